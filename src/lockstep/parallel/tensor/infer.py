"""A plan found by looking at a model: names and shapes propose, a rehearsal decides.

Proposed are, of each module that is called: projections of queries, keys and values with an output layer (one
by one, or in one layer); pairs of linears from a width to a hidden width and back; and the token embedding and
output layer. What does not pass, or is not understood, stays whole, and the plan says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from lockstep.model.blocks import joined_name
from lockstep.model.equal_modules import Found
from lockstep.parallel.tensor.attention import COUNTS, check_heads, heads_of, region_of
from lockstep.parallel.tensor.plan import (
    AttentionRegion,
    PlanEntry,
    TensorPlan,
    computes_linear,
    features,
    is_linear,
    words,
)
from lockstep.parallel.tensor.rehearsal_run import TensorRehearsal
from lockstep.parallel.tensor.rehearse import Passed, run_rehearsal
from lockstep.torch_internals import modules as torch_modules

INFERRED = "inferred"
QUERY = words("q q_proj query to_q wq Wq q_lin query_proj linear_q q_linear query_layer")
OUTPUT = words(
    "o o_proj out out_proj proj dense to_out wo Wo out_lin c_proj output linear_out o_linear projection fc_out "
    "to_out.0 resid_proj"
)
FUSED = words(
    "qkv c_attn Wqkv in_proj qkv_proj query_key_value to_qkv attn_qkv c_qkv wqkv W_qkv qkv_linear linear_qkv"
)
TOKENS = words(
    "token tokens tok wte word_embeddings embed_tokens token_embedding tok_emb token_embeddings tok_embeddings "
    "token_emb tok_embed embedding embed embeddings emb embed_in word_embedding token_embed input_embedding shared"
)
HEAD = words("lm_head head output embed_out decoder proj to_logits logits unembed out fc_out")

Pair = tuple[dict[str, str], tuple[str, ...]]
"""Column layers with their styles, and row layers."""
RehearsedRegion = tuple[AttentionRegion, Passed, dict[str, str]]
"""With the styles of its column layers."""


@dataclass
class _Findings:
    ranks: int
    entries: list[PlanEntry] = field(default_factory=list)
    attention: list[AttentionRegion] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    rehearsed: Found = field(default_factory=lambda: Found(attributes=COUNTS))

    def add(
        self, prefix: str, columns: dict[str, str], rows: tuple[str, ...], why: str, passed: Passed
    ) -> None:
        self.entries += [
            PlanEntry(joined_name(prefix, name), style, why, passed.meets) for name, style in columns.items()
        ]
        self.entries += [PlanEntry(joined_name(prefix, row), "rowwise", why) for row in rows]
        for name in passed.partial:
            self.entries.append(
                PlanEntry(
                    joined_name(prefix, name), "replicated_with_grad_allreduce", "works on parts of features"
                )
            )

    def names(self) -> set[str]:
        return {entry.name for entry in self.entries} | set(self.left)


def infer_plan(model: nn.Module, ranks: int, blocks: dict[str, nn.Module]) -> TensorPlan:
    """Raises UsageError where heads, features or a vocabulary that would be split do not divide."""
    findings = _Findings(ranks)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, nn.MultiheadAttention):
            findings.left[name] = "nn.MultiheadAttention computes with all of its weights at once"
            findings.left.update(
                (joined_name(name, inner), "inside nn.MultiheadAttention")
                for inner, layer in module.named_modules()
                if inner and is_linear(layer)
            )
    # Attention first: what it takes no longer counts as a pair of layers.
    for name, module in modules.items():
        if name not in findings.left:
            find_attention(name, module, modules, findings)
    for name, module in modules.items():
        if type(module).forward is not nn.Module.forward:
            _find_pairs(name, module, findings, _pairs)
    _find_vocabulary(modules, blocks, findings)
    for name, module in modules.items():
        # Last, what else fits: any two layers may be a pair, so that this is tried only on what was left.
        if type(module).forward is not nn.Module.forward and _has_flat_parameters(module):
            _find_pairs(name, module, findings, _pairs_of_any_widths)
    for name, module in modules.items():
        if is_linear(module) and name not in findings.names():
            findings.left[name] = "not part of a pair of layers that was found"
    return TensorPlan(INFERRED, tuple(findings.entries), tuple(findings.attention), findings.left)


# -- attention -------------------------------------------------------------------------------------------


def find_attention(name: str, module: nn.Module, modules: dict[str, nn.Module], findings: _Findings) -> None:
    for columns, query, key in projections(module):
        place, prefix, row = output_layer(name, module, columns, modules)
        names = [joined_name(name, column) for column in columns]
        if row is None:
            findings.left.update(dict.fromkeys(names, "no output layer was found for these projections"))
            return
        heads = heads_of(module, query, key)
        if heads is None:
            findings.left.update(
                dict.fromkeys([*names, joined_name(place, row)], "the number of heads is not known")
            )
            return
        inside = {joined_name(prefix, column): style for column, style in columns.items()}
        rehearsal = TensorRehearsal(modules[place], inside, (row,), findings.ranks, prefix, heads[0])
        check_heads(name, heads, findings.ranks)
        result = rehearsed_region(findings.rehearsed, rehearsal, name, module, heads)
        if isinstance(result, str):
            findings.left.update(dict.fromkeys([*names, joined_name(place, row)], result))
            return
        region, passed, rehearsed_columns = result
        findings.attention.append(replace(region, name=name, around=place))
        count = f"{heads[0]} heads" + (f", {heads[1]} of keys and values" if heads[1] != heads[0] else "")
        findings.add(place, rehearsed_columns, (row,), f"attention: {count}", passed)
        return


def output_layer(
    name: str, module: nn.Module, columns: Iterable[str], modules: dict[str, nn.Module]
) -> tuple[str, str, str | None]:
    """(module around projections and output layer, name of the projections' module in it, name of the output layer)."""
    last = next((names[3] for names, _, _ in _in_lists(module) if set(names[:3]) == set(columns)), None)
    row = last or next((n for n in OUTPUT if _linear(module, n) is not None and n not in columns), None)
    if row is not None or not name:
        return name, "", row
    # In a module beside it, as in BERT: attention.self.query, attention.output.dense.
    place, _, prefix = name.rpartition(".")
    return place, prefix, _beside(modules[place], prefix)


def rehearsed_region(
    known: Found, rehearsal: TensorRehearsal, name: str, holder: nn.Module, heads: tuple[int, int]
) -> RehearsedRegion | str:
    """As ``region_with_styles``; modules that are alike are rehearsed once."""
    among = (rehearsal.holder, heads, tuple(rehearsal.columns.items()), rehearsal.rows, rehearsal.ranks)
    return known.find_once(
        rehearsal.module, among, lambda: region_with_styles(rehearsal, name, holder, heads)
    )


def region_with_styles(
    rehearsal: TensorRehearsal, name: str, holder: nn.Module, heads: tuple[int, int]
) -> RehearsedRegion | str:
    """(region, passed, columns), or why not; rows of one layer may be [q; k; v], or q, k, v of head after head."""
    fused = ("qkv_colwise",) if len(rehearsal.columns) == 1 else ()
    styles = list(dict.fromkeys((*rehearsal.columns.values(), "colwise", *fused)))
    reason = ""
    for style in styles:
        columns = dict.fromkeys(rehearsal.columns, style)
        found = region_of(replace(rehearsal, columns=columns), name, holder, heads)
        if not isinstance(found, str):
            return (*found, columns)
        reason = reason or found
    return reason


def projections(module: nn.Module) -> Iterator[tuple[dict[str, str], nn.Module, nn.Module | None]]:
    for query in QUERY:
        names = (query, _renamed(query, "k", "key"), _renamed(query, "v", "value"))
        layers = [_linear(module, name) for name in names]
        if all(layer is not None for layer in layers):
            q, k, v = layers
            assert q is not None
            assert k is not None
            assert v is not None
            if features(k) == features(v):
                yield dict.fromkeys(names, "colwise"), q, k
    yield from ((dict.fromkeys(names[:3], "colwise"), q, k) for names, q, k in _in_lists(module))
    for fused in FUSED:
        layer = _linear(module, fused)
        # As many rows as query, key and value of the input's width have together.
        if layer is not None and features(layer)[1] == 3 * features(layer)[0]:
            yield {fused: "qkv_colwise"}, layer, None


def _in_lists(module: nn.Module) -> Iterator[tuple[list[str], nn.Module, nn.Module]]:
    """(names, query, key) of lists of four linears, as in 'The Annotated Transformer': query, key, value, output."""
    for child, layers in module.named_children():
        if isinstance(layers, nn.ModuleList) and len(layers) == 4 and all(map(is_linear, layers)):
            query, key, value, output = layers
            if features(key) == features(value) and features(output) == features(query)[::-1]:
                yield [f"{child}.{number}" for number in range(4)], query, key


def _renamed(query: str, letter: str, word: str) -> str:
    if "query" in query:
        return query.replace("query", word)
    head, _, tail = query.rpartition("q")
    return f"{head}{letter}{tail}"


def _beside(parent: nn.Module, name: str) -> str | None:
    found = [
        inner
        for child, module in parent.named_children()
        if child != name
        for inner, layer in module.named_modules(prefix=child)
        if is_linear(layer)
    ]
    return found[0] if len(found) == 1 else None


# -- pairs -----------------------------------------------------------------------------------------------


def _find_pairs(
    name: str,
    module: nn.Module,
    findings: _Findings,
    proposed: Callable[[dict[str, nn.Module], bool], Iterator[Pair]],
) -> None:
    taken = findings.names()
    layers = {
        child: layer
        for child, layer in module.named_children()
        if is_linear(layer)
        and joined_name(name, child) not in taken
        and "weight" in torch_modules.parameters_of(layer)
    }
    while len(layers) > 1:
        candidates = list(proposed(layers, isinstance(module, nn.Sequential)))
        if not candidates:
            return
        # Several that begin alike are ways to read the same layers: the first that passes counts.
        first = candidates[0]
        ways = [found for found in candidates if found[0] == first[0] and set(found[1]) <= set(first[1])]
        reason = ""
        for columns, rows in ways:
            result = _rehearsed_pair(module, columns, rows, findings)
            if isinstance(result, Passed):
                hidden = features(module.get_submodule(rows[0]))[0]
                findings.add(name, columns, rows, f"{hidden} features between a pair of layers", result)
                break
            reason = reason or result
        else:
            columns, rows = ways[-1]
            for child in (*columns, *rows):
                findings.left[joined_name(name, child)] = reason
        for child in (*columns, *rows):
            layers.pop(child)


def _has_flat_parameters(module: nn.Module) -> bool:
    """Whether all are its own or its children's: a large model is not run as a whole for two layers at its top."""
    return all(name.count(".") < 2 for name, _ in module.named_parameters())


def _rehearsed_pair(
    module: nn.Module, columns: dict[str, str], rows: tuple[str, ...], findings: _Findings
) -> Passed | str:
    hidden = features(module.get_submodule(rows[0]))[0]
    own = next(
        (child for child in (*columns, *rows) if not computes_linear(module.get_submodule(child))), None
    )
    if own is not None:
        return f"'{own}' has a forward that is not that of nn.Linear"
    if hidden % findings.ranks:
        return f"{hidden} features do not divide by {findings.ranks} ranks"
    rehearsal = TensorRehearsal(module, columns, rows, findings.ranks)
    among = (tuple(columns.items()), rows)
    return findings.rehearsed.find_once(module, among, lambda: run_rehearsal(rehearsal))


def _pairs(layers: dict[str, nn.Module], in_order: bool) -> Iterator[Pair]:
    """(column layers with styles, row layers): from a width to a hidden width, and back, or on to several others."""
    names = list(layers)
    if in_order:
        for first, second in itertools.pairwise(names):
            if features(layers[first])[1] == features(layers[second])[0]:
                yield {first: "colwise"}, (second,)
        return
    for row in names:
        hidden, width = features(layers[row])
        before = [name for name in names if name != row and features(layers[name])[0] == width]
        same = [name for name in before if features(layers[name])[1] == hidden]
        # One layer (up) or two (gate and up) before the row layer.
        if 1 <= len(same) <= 2 and names.index(row) > names.index(same[0]):
            yield from _with_more_rows(layers, dict.fromkeys(same, "colwise"), row)
        packed = [name for name in before if features(layers[name])[1] == 2 * hidden]
        # Gate and up in one layer.
        if len(packed) == 1:
            yield from _with_more_rows(layers, {packed[0]: "packed_colwise"}, row)


def _pairs_of_any_widths(layers: dict[str, nn.Module], in_order: bool) -> Iterator[Pair]:
    for first, second in itertools.combinations(layers, 2):
        if features(layers[first])[1] == features(layers[second])[0]:
            yield from _with_more_rows(layers, {first: "colwise"}, second)


def _with_more_rows(layers: dict[str, nn.Module], columns: dict[str, str], row: str) -> Iterator[Pair]:
    hidden = features(layers[row])[0]
    more = [name for name, layer in layers.items() if name not in columns and features(layer)[0] == hidden]
    if len(more) > 1:
        yield columns, tuple(more)
    yield columns, (row,)


# -- vocabulary ------------------------------------------------------------------------------------------


def _find_vocabulary(
    modules: dict[str, nn.Module], blocks: dict[str, nn.Module], findings: _Findings
) -> None:
    outside = {
        name: module
        for name, module in modules.items()
        if not any(name == block or name.startswith(f"{block}.") for block in blocks)
    }
    embeddings = {name: m for name, m in outside.items() if isinstance(m, nn.Embedding)}
    taken = findings.names()
    for name, table in embeddings.items():
        rows = table.num_embeddings
        heads = [
            other
            for other, layer in outside.items()
            if isinstance(layer, nn.Linear)
            and other not in taken
            and layer.out_features == rows
            and computes_linear(layer)
            and (layer.weight is table.weight or other.rpartition(".")[2] in HEAD)
        ]
        # Positions and types have embeddings too: only a known name or an output layer tells that these are tokens.
        last = name.rpartition(".")[2]
        if not (last in TOKENS or heads) or table.max_norm is not None or table.sparse:
            findings.left[name] = "not known as an embedding of tokens"
            continue
        findings.entries.append(PlanEntry(name, "embedding_rowwise", f"vocabulary of {rows}"))
        for head in heads[:1]:
            of_head = torch_modules.parameters_of(modules[head])["weight"]
            tie = ", tied" if of_head is torch_modules.parameters_of(table)["weight"] else ""
            findings.entries.append(PlanEntry(head, "colwise_gather_output", f"vocabulary of {rows}{tie}"))
            taken.add(head)


def _linear(module: nn.Module, name: str) -> nn.Module | None:
    try:
        found = module.get_submodule(name)
    except AttributeError:
        return None
    if not is_linear(found) or "weight" not in torch_modules.parameters_of(found):
        return None
    return found if computes_linear(found) else None
