"""Attention modules: their heads, and what of them counts heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lockstep.errors import UsageError
from lockstep.parallel.tensor.plan import AttentionRegion, features, words
from lockstep.parallel.tensor.rehearsal_run import TensorRehearsal
from lockstep.parallel.tensor.rehearse import Passed, first_that_passes

HEADS = words(
    "heads n_head n_heads num_heads nheads num_attention_heads n_local_heads nhead h H nh n_h num_head head_num "
    "attention_heads attn_heads"
)
KV_HEADS = words(
    "kv_heads n_kv_head n_kv_heads num_kv_heads num_key_value_heads n_local_kv_heads num_query_groups"
)
WIDTHS = words(
    "width embed_dim embed_size hidden_size n_embd d_model dim dim_model model_dim inner_dim all_head_size split_size "
    "hidden_dim attention_size q_size kv_size"
)
COUNTS = (*HEADS, *KV_HEADS, *WIDTHS)
CONFIG_HEADS = words("num_attention_heads n_head num_heads n_heads heads")
CONFIG_KV_HEADS = words("num_key_value_heads num_kv_heads n_kv_heads")


def heads_of(module: nn.Module, query: nn.Module, key: nn.Module | None) -> tuple[int, int] | None:
    """(heads, key-value heads), from attributes of the module or of its config; None if they are not known."""
    config: object = getattr(module, "config", None)
    width = getattr(module, "head_dim", None)
    if isinstance(width, int) and width > 0 and key is not None:
        # Rows of a projection = heads * width of a head.
        rows, key_rows = features(query)[1], features(key)[1]
        if rows % width == 0 and key_rows % width == 0:
            return rows // width, key_rows // width
    heads = _integer(module, HEADS) or _integer(config, CONFIG_HEADS)
    if heads is None:
        return None
    kv_heads = _integer(module, KV_HEADS) or _integer(config, CONFIG_KV_HEADS) or heads
    return heads, kv_heads


def check_heads(name: str, heads: tuple[int, int], ranks: int) -> None:
    """Raises UsageError where heads do not divide."""
    for number, kind in zip(heads, ("attention heads", "key-value heads"), strict=True):
        if number % ranks:
            fitting = [str(n) for n in range(1, number + 1) if heads[0] % n == 0 and heads[1] % n == 0]
            raise UsageError(
                f"The {number} {kind} of '{name}' cannot be divided among tp={ranks} ranks. "
                f"Use tp={' or '.join(fitting) or 1}, or leave its layers out with a tp_plan of your own."
            )


def region_of(
    rehearsal: TensorRehearsal, name: str, holder: nn.Module, heads: tuple[int, int]
) -> tuple[AttentionRegion, Passed] | str:
    """How the module ``holder`` of this ``name`` counts with a share of its heads, or why that is not known."""
    found = first_that_passes(rehearsal, list(_candidates(holder, heads, rehearsal.ranks)))
    if isinstance(found, str):
        return found
    attributes, reports_width, passed = found
    region = AttentionRegion(name, *heads, dict(attributes), reports_width, passed.arguments)
    return region, passed


def by_names_alone(name: str, holder: nn.Module, heads: tuple[int, int], ranks: int) -> AttentionRegion:
    """The counts of heads, where running the module is not possible."""
    return AttentionRegion(name, *heads, _share(holder, (*HEADS, *KV_HEADS), set(heads), ranks))


def _candidates(
    holder: nn.Module, heads: tuple[int, int], ranks: int
) -> Iterator[tuple[Mapping[str, int], bool]]:
    counts = _share(holder, (*HEADS, *KV_HEADS), set(heads), ranks)
    widths = _share(holder, WIDTHS, None, ranks)
    # From what changes least to what changes most: the first that passes counts.
    yield {}, False
    yield counts, False
    yield {**counts, **widths}, False
    yield counts, True
    yield {**counts, **widths}, True


def _share(module: nn.Module, names: tuple[str, ...], values: set[int] | None, ranks: int) -> dict[str, int]:
    found = {name: vars(module).get(name) for name in names}
    return {
        name: value // ranks
        for name, value in found.items()
        if type(value) is int and value % ranks == 0 and (values is None or value in values)
    }


def _integer(source: object, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(source, name, None)
        if type(value) is int and value > 0:
            return value
    return None
