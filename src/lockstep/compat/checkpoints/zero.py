"""Put parameters together from the flat vectors into which ZeRO cut them: arithmetic, without files.

- Stages 1 and 2: for each group of parameters, the ranks' vectors end to end are all parameters end to end,
  with ``param_alignment_paddings`` (if any) after each and padding at the end.
- Stage 3: each parameter was cut into ``world`` parts of ``ceil(numel / world)`` elements; a rank's vectors,
  one for each subgroup, have its part of each parameter end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.compat.checkpoints.tensors import Scratch


@dataclass(frozen=True)
class ZeroSpan:
    """Where a parameter lies in the vectors of its group.

    ``start`` and ``length`` count elements of the whole vector under stages 1 and 2, of each rank's under 3.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    start: int
    length: int


def spans_of_stage_1_and_2(
    shapes: Sequence[Mapping[str, object]], paddings: Sequence[Sequence[int]] | None = None
) -> list[ZeroSpan]:
    """Compute spans from the shapes of each group's parameters, in their order. Raises ValueError."""
    spans = []
    for group, named in enumerate(shapes):
        after = paddings[group] if paddings else [0] * len(named)
        start = 0
        for (name, shape), padding in zip(named.items(), after, strict=True):
            length = math.prod(checked_shape(shape))
            spans.append(ZeroSpan(name, checked_shape(shape), group, start, length))
            start += length + padding
    return spans


def spans_of_stage_3(
    shapes: Sequence[Mapping[str, object]], lengths: Sequence[int], world: int
) -> list[ZeroSpan]:
    """Compute spans from the shapes of each subgroup's parameters and its vector's length on each rank. Raises
    ValueError."""
    spans = []
    for group, (named, found) in enumerate(zip(shapes, lengths, strict=True)):
        start = 0
        for name, shape in named.items():
            length = -(-math.prod(checked_shape(shape)) // world)
            spans.append(ZeroSpan(name, checked_shape(shape), group, start, length))
            start += length
        if start != found:
            raise ValueError(f"subgroup {group} should have {start} elements on each rank, but has {found}")
    return spans


def join_stage_1_and_2(span: ZeroSpan, by_rank: Sequence[torch.Tensor], scratch: Scratch) -> torch.Tensor:
    """Return the parameter, of ``span.shape``, from the ranks' vectors [n]; a view where one rank has all of it.

    Raises:
        ValueError: elements are missing.
    """
    parts, base = [], 0
    for vector in by_rank:
        # What of the parameter lies in this rank's vector.
        first, last = max(span.start - base, 0), min(span.start + span.length - base, len(vector))
        if first < last:
            parts.append(vector[first:last])
        base += len(vector)
    return _concatenated(span, parts, by_rank[0].dtype, scratch)


def join_stage_3(span: ZeroSpan, by_rank: Sequence[torch.Tensor], scratch: Scratch) -> torch.Tensor:
    """Return the parameter, of ``span.shape``, from the ranks' vectors [n]; a view where there is one rank.

    Raises:
        ValueError: elements are missing.
    """
    parts, left = [], math.prod(span.shape)
    for vector in by_rank:
        own = vector[span.start : span.start + min(span.length, left)]
        if len(own):
            parts.append(own)
        left -= len(own)
    return _concatenated(span, parts, by_rank[0].dtype, scratch)


def _concatenated(
    span: ZeroSpan, parts: list[torch.Tensor], dtype: torch.dtype, scratch: Scratch
) -> torch.Tensor:
    count, found = math.prod(span.shape), sum(len(part) for part in parts)
    if found != count:
        raise ValueError(f"{span.name} of shape {span.shape} has {found} elements")
    if len(parts) == 1:
        return parts[0].view(span.shape)
    whole, at = scratch.empty((count,), dtype), 0
    for part in parts:
        whole[at : at + len(part)] = part
        at += len(part)
    return whole.view(span.shape)


def checked_shape(value: object) -> tuple[int, ...]:
    """Return ``value`` as a shape. Raises ValueError if it is none."""
    if not isinstance(value, (tuple, list)) or any(type(size) is not int or size < 0 for size in value):
        raise ValueError(f"{str(value)[:60]} is no shape")
    return tuple(value)
