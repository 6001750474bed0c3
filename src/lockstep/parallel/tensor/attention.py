"""Attention modules by the names of their layers: their heads, and which of their attributes count heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lockstep.errors import UsageError
from lockstep.model.blocks import joined_name
from lockstep.parallel.tensor.plan import AttentionRegion, TensorPlan, features, is_linear, words
from lockstep.torch_internals import modules as torch_modules

QUERY = words("q q_proj query to_q wq Wq q_lin query_proj linear_q q_linear query_layer")
OUTPUT = words(
    "o o_proj out out_proj proj dense to_out wo Wo out_lin c_proj output linear_out o_linear projection fc_out "
    "to_out.0 resid_proj"
)
FUSED = {
    **dict.fromkeys(
        words("qkv c_attn Wqkv in_proj qkv_proj to_qkv attn_qkv c_qkv wqkv W_qkv qkv_linear linear_qkv"),
        "qkv_colwise",
    ),
    # Megatron-LM's name, as in GPT-NeoX and BLOOM: query, key and value of one head after the other.
    "query_key_value": "colwise",
}
HEADS = words(
    "heads n_head n_heads num_heads nheads num_attention_heads n_local_heads nhead h H nh n_h num_head head_num "
    "attention_heads attn_heads"
)
KV_HEADS = words(
    "kv_heads n_kv_head n_kv_heads num_kv_heads num_key_value_heads n_local_kv_heads num_query_groups"
)
WIDTHS = words(
    "width embed_dim embed_size hidden_size n_embd d_model dim dim_model model_dim inner_dim all_head_size split_size "
    "hidden_dim attention_size q_size kv_size attn_dim"
)
CONFIG_HEADS = words("num_attention_heads n_head num_heads n_heads heads")
CONFIG_KV_HEADS = words("num_key_value_heads num_kv_heads n_kv_heads")


@dataclass(frozen=True)
class Projections:
    """Layers of attention by their names in the module ``around``: ``columns`` with styles, and ``row``, the output."""

    around: str
    columns: dict[str, str]
    query: nn.Module
    key: nn.Module | None
    row: str | None


def projections_in(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> Iterator[Projections]:
    """Return the projections of the module of this ``name``, as it may be read."""
    for child, layers in module.named_children():
        # As in 'The Annotated Transformer': query, key, value and output in one list.
        if isinstance(layers, nn.ModuleList) and len(layers) == 4 and all(map(is_linear, layers)):
            query, key, value, output = layers
            if features(key) == features(value) and features(output) == features(query)[::-1]:
                columns = {f"{child}.{number}": "colwise" for number in range(3)}
                yield Projections(name, columns, query, key, f"{child}.3")
    for letter in QUERY:
        names = (letter, _renamed(letter, "k", "key"), _renamed(letter, "v", "value"))
        q, k, v = (_linear(module, one) for one in names)
        if q is not None and k is not None and v is not None and features(k) == features(v):
            yield _with_output(name, module, dict.fromkeys(names, "colwise"), q, k, modules)
    for fused, style in FUSED.items():
        layer = _linear(module, fused)
        # As many rows as query, key and value of the input's width have together.
        if layer is not None and features(layer)[1] == 3 * features(layer)[0]:
            yield _with_output(name, module, {fused: style}, layer, None, modules)


def _with_output(
    name: str,
    module: nn.Module,
    columns: dict[str, str],
    query: nn.Module,
    key: nn.Module | None,
    modules: dict[str, nn.Module],
) -> Projections:
    row = next((n for n in OUTPUT if _linear(module, n) is not None and n not in columns), None)
    if row is not None or not name:
        return Projections(name, columns, query, key, row)
    # In a module beside it, as in BERT: attention.self.query, attention.output.dense.
    around, _, prefix = name.rpartition(".")
    beside = [
        inner
        for child, other in modules[around].named_children()
        if child != prefix
        for inner, layer in other.named_modules(prefix=child)
        if is_linear(layer)
    ]
    inside = {joined_name(prefix, column): style for column, style in columns.items()}
    return Projections(around, inside, query, key, beside[0] if len(beside) == 1 else None)


def attention_regions(model: nn.Module, plan: TensorPlan, ranks: int) -> tuple[AttentionRegion, ...]:
    """Return the attention modules whose heads the plan splits.

    Raises:
        UsageError: heads do not divide, or some of their layers are split and others are not.
    """
    modules = dict(model.named_modules())
    styles, regions = plan.styles, []
    for name, module in modules.items():
        for found in projections_in(name, module, modules):
            names = [joined_name(found.around, column) for column in found.columns]
            split = [n for n in names if styles.get(n) in ("colwise", "packed_colwise", "qkv_colwise")]
            heads = heads_of(module, found)
            if not split or heads is None:
                continue
            if len(split) < len(names):
                missing = ", ".join(repr(n) for n in names if n not in split)
                raise UsageError(
                    f"{plan.source} splits '{split[0]}' but not {missing} of the same attention, but all of "
                    "these must have the same heads. Give all of them the style 'colwise', or none."
                )
            check_heads(name, heads, ranks)
            regions.append(AttentionRegion(name, *heads, _attributes_of_rank(module, found, heads, ranks)))
            break
    return tuple(regions)


def _attributes_of_rank(
    module: nn.Module, found: Projections, heads: tuple[int, int], ranks: int
) -> dict[str, int]:
    """Attributes that count heads, or all their features: name -> what a rank has of these."""
    rows = features(found.query)[1]
    widths = {
        rows if found.key is not None else rows // 3,
        *([] if found.key is None else features(found.key)[1:]),
    }
    counted = [((*HEADS, *KV_HEADS), set(heads)), (WIDTHS, widths)]
    return {
        name: value // ranks
        for names, numbers in counted
        for name in names
        if type(value := vars(module).get(name)) is int and value in numbers and value % ranks == 0
    }


def heads_of(module: nn.Module, found: Projections) -> tuple[int, int] | None:
    """Return (heads, key-value heads), from attributes of the module or of its config; None if they are not known."""
    config: object = getattr(module, "config", None)
    width = getattr(module, "head_dim", None)
    if isinstance(width, int) and width > 0 and found.key is not None:
        # Rows of a projection = heads * width of a head.
        rows, key_rows = features(found.query)[1], features(found.key)[1]
        if rows % width == 0 and key_rows % width == 0:
            return rows // width, key_rows // width
    heads = _integer(module, HEADS) or _integer(config, CONFIG_HEADS)
    if heads is None:
        return None
    return heads, _integer(module, KV_HEADS) or _integer(config, CONFIG_KV_HEADS) or heads


def check_heads(name: str, heads: tuple[int, int], ranks: int) -> None:
    """Raise UsageError where heads do not divide."""
    for number, kind in zip(heads, ("attention heads", "key-value heads"), strict=True):
        if number % ranks:
            fitting = [str(n) for n in range(1, number + 1) if heads[0] % n == 0 and heads[1] % n == 0]
            raise UsageError(
                f"The {number} {kind} of '{name}' cannot be divided among tp={ranks} ranks. "
                f"Use tp={' or '.join(fitting) or 1}, or leave its layers out with a tp_plan of your own."
            )


def _renamed(query: str, letter: str, word: str) -> str:
    if "query" in query:
        return query.replace("query", word)
    head, _, tail = query.rpartition("q")
    return f"{head}{letter}{tail}"


def _linear(module: nn.Module, name: str) -> nn.Module | None:
    try:
        found = module.get_submodule(name)
    except AttributeError:
        return None
    return found if is_linear(found) and "weight" in torch_modules.parameters_of(found) else None


def _integer(source: object, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(source, name, None)
        if type(value) is int and value > 0:
            return value
    return None
