"""A plan found by names and shapes; the first batch proves it.

Proposed are projections of queries, keys and values with an output layer (one by one, or in one layer); pairs of
linears from a width to other hidden features and on; and the token embedding with its output layer. Where a module has
something of its own for each head or hidden feature, its layers stay whole, and the plan says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from lockstep.model.blocks import joined_name
from lockstep.parallel.tensor.attention import Projections, check_heads, heads_of, projections_in
from lockstep.parallel.tensor.plan import PlanEntry, TensorPlan, features, is_linear, words
from lockstep.torch_internals import modules as torch_modules

TOKENS = words(
    "token tokens tok wte word_embeddings embed_tokens token_embedding tok_emb token_embeddings tok_embeddings "
    "token_emb tok_embed embedding embed embeddings emb embed_in word_embedding token_embed input_embedding shared"
)
HEAD = words("lm_head head output embed_out decoder proj to_logits logits unembed out fc_out")

Pair = tuple[dict[str, str], list[str]]
"""Column layers with their styles, and row layers."""


@dataclass
class _Findings:
    ranks: int
    entries: dict[str, PlanEntry] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def add(self, prefix: str, columns: dict[str, str], rows: list[str], why: str) -> None:
        for name, style in {**columns, **dict.fromkeys(rows, "rowwise")}.items():
            self.entries[joined_name(prefix, name)] = PlanEntry(joined_name(prefix, name), style, why)

    def leave(self, prefix: str, names: list[str], why: str) -> None:
        self.left.update((joined_name(prefix, name), why) for name in names)

    def is_free(self, name: str) -> bool:
        return name not in self.entries and name not in self.left


def infer_plan(model: nn.Module, ranks: int, blocks: dict[str, nn.Module]) -> TensorPlan:
    """Raise UsageError where heads or a vocabulary that would be split do not divide."""
    findings = _Findings(ranks)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, nn.MultiheadAttention):
            inside = [inner for inner, layer in module.named_modules() if not inner or is_linear(layer)]
            findings.leave(name, inside, "nn.MultiheadAttention computes with all of its weights at once")
    # Attention first: what it takes no longer counts as a pair of layers.
    for name, module in modules.items():
        found = next(projections_in(name, module, modules), None)
        if found is not None and findings.is_free(name):
            _add_attention(name, module, modules[found.around], found, findings)
    called = {n: m for n, m in modules.items() if type(m).forward is not nn.Module.forward}
    for name, module in called.items():
        _add_pairs(name, module, findings, any_widths=False)
    _add_vocabulary(modules, blocks, findings)
    for name, module in called.items():
        # Last, because any two layers may be such a pair.
        if all(inner.count(".") < 2 for inner, _ in module.named_parameters()):
            _add_pairs(name, module, findings, any_widths=True)
    for name, module in modules.items():
        if is_linear(module) and findings.is_free(name):
            findings.left[name] = "not part of a pair of layers that was found"
    return TensorPlan("inferred", tuple(findings.entries.values()), left=findings.left)


def _add_attention(
    name: str, module: nn.Module, around: nn.Module, found: Projections, findings: _Findings
) -> None:
    layers = [*found.columns, *([] if found.row is None else [found.row])]
    heads = heads_of(module, found)
    own = next((n for n in layers if not _computes_linear(around.get_submodule(n))), None)
    if found.row is None:
        reason = "no output layer was found for these projections"
    elif heads is None:
        reason = "the number of heads is not known"
    elif own is not None:
        reason = f"'{own}' has a forward that is not that of nn.Linear"
    elif any(_has_size(around, heads[0], layers)):
        reason = "the module has parameters of each head"
    else:
        check_heads(name, heads, findings.ranks)
        count = f"{heads[0]} heads" + (f", {heads[1]} of keys and values" if heads[1] != heads[0] else "")
        findings.add(found.around, found.columns, [found.row], f"attention: {count}")
        return
    findings.leave(found.around, layers, reason)


def _has_size(module: nn.Module, size: int, layers: list[str]) -> Iterator[str]:
    """Yield names of parameters with a dimension of this size, other than those of ``layers`` and of norms."""
    for name, inner in module.named_modules():
        if name not in layers and "norm" not in type(inner).__name__.lower():
            for key, parameter in torch_modules.parameters_of(inner).items():
                if parameter is not None and size in parameter.shape:
                    yield joined_name(name, key)


# -- pairs -----------------------------------------------------------------------------------------------


def _add_pairs(name: str, module: nn.Module, findings: _Findings, any_widths: bool) -> None:
    layers = {
        child: layer
        for child, layer in module.named_children()
        if is_linear(layer)
        and findings.is_free(joined_name(name, child))
        and "weight" in torch_modules.parameters_of(layer)
    }
    in_order = isinstance(module, nn.Sequential)
    while pair := next(_any_pairs(layers) if any_widths or in_order else _pairs(layers), None):
        columns, rows = pair
        hidden = features(layers[rows[0]])[0]
        reason = _why_whole(module, columns, rows, findings.ranks)
        if reason:
            findings.leave(name, [*columns, *rows], reason)
        else:
            findings.add(name, columns, rows, f"{hidden} features between a pair of layers")
        for child in (*columns, *rows):
            layers.pop(child)


def _why_whole(module: nn.Module, columns: dict[str, str], rows: list[str], ranks: int) -> str:
    pair = {name: module.get_submodule(name) for name in (*columns, *rows)}
    width, hidden = features(pair[next(iter(columns))])[0], features(pair[rows[0]])[0]
    own = next((name for name, layer in pair.items() if not _computes_linear(layer)), None)
    if own is not None:
        return f"'{own}' has a forward that is not that of nn.Linear"
    if hidden % ranks:
        return f"{hidden} features do not divide by {ranks} ranks"
    if isinstance(module, nn.Sequential):
        names = [name for name, _ in module.named_children()]
        between = names[names.index(next(iter(columns))) + 1 : names.index(rows[0])]
    elif width == hidden:
        return "as many features are between the layers as before them"
    else:
        between = ["", *(name for name, _ in module.named_children() if name not in pair)]
    for name in between:
        inner = module.get_submodule(name)
        mixes = name and any(word in type(inner).__name__.lower() for word in ("softmax", "norm"))
        sizes = [p.shape for p in torch_modules.parameters_of(inner).values() if p is not None]
        if (mixes and isinstance(module, nn.Sequential)) or any(hidden in shape for shape in sizes):
            return f"'{name or type(module).__name__}' has something for all features between the layers"
    return ""


def _computes_linear(layer: nn.Module) -> bool:
    """Return whether it has the forward of its class: another one may quantise or normalise the whole weight."""
    return not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward


def _pairs(layers: dict[str, nn.Module]) -> Iterator[Pair]:
    """Yield pairs that lead from a width to hidden features and back."""
    names = list(layers)
    for row in names:
        hidden, width = features(layers[row])
        before = [name for name in names if name != row and features(layers[name])[0] == width]
        same = [name for name in before if features(layers[name])[1] == hidden]
        # One layer (up) or two (gate and up) before the row layer.
        if 1 <= len(same) <= 2 and names.index(row) > names.index(same[0]):
            yield dict.fromkeys(same, "colwise"), _rows(layers, same, row)
        # Gate and up in one layer.
        packed = [name for name in before if features(layers[name])[1] == 2 * hidden]
        if len(packed) == 1:
            yield {packed[0]: "packed_colwise"}, _rows(layers, packed, row)


def _any_pairs(layers: dict[str, nn.Module]) -> Iterator[Pair]:
    """Yield pairs of layers one after the other, of any widths."""
    for first, second in itertools.pairwise(layers):
        if features(layers[first])[1] == features(layers[second])[0]:
            yield {first: "colwise"}, _rows(layers, [first], second)


def _rows(layers: dict[str, nn.Module], columns: list[str], row: str) -> list[str]:
    """Return all layers that take as many features, unless one gives as many: then others may take what that one
    gives."""
    hidden = features(layers[row])[0]
    rows = [name for name, layer in layers.items() if name not in columns and features(layer)[0] == hidden]
    return rows if all(features(layers[name])[1] != hidden for name in rows) else [row]


# -- vocabulary ------------------------------------------------------------------------------------------


def _add_vocabulary(modules: dict[str, nn.Module], blocks: dict[str, nn.Module], findings: _Findings) -> None:
    outside = {
        name: module
        for name, module in modules.items()
        if not any(name == block or name.startswith(f"{block}.") for block in blocks)
    }
    for name, table in outside.items():
        if not isinstance(table, nn.Embedding):
            continue
        rows = table.num_embeddings
        heads = [
            other
            for other, layer in outside.items()
            if isinstance(layer, nn.Linear)
            and findings.is_free(other)
            and layer.out_features == rows
            and _computes_linear(layer)
            and (layer.weight is table.weight or other.rpartition(".")[2] in HEAD)
        ]
        # Positions and types have embeddings too: only a known name or an output layer tells that these are tokens.
        is_known = name.rpartition(".")[2] in TOKENS or bool(heads)
        if not is_known or table.max_norm is not None or table.sparse:
            findings.left[name] = "not known as an embedding of tokens"
            continue
        findings.entries[name] = PlanEntry(name, "embedding_rowwise", f"vocabulary of {rows}")
        for head in heads[:1]:
            of_head = torch_modules.parameters_of(modules[head])["weight"]
            tie = ", tied" if of_head is torch_modules.parameters_of(table)["weight"] else ""
            findings.entries[head] = PlanEntry(head, "colwise_gather_output", f"vocabulary of {rows}{tie}")
