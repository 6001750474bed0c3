"""Bytes that a rank sends, by axis of the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lockstep.config.world import ParallelDims

ORDER = ("pp", "replicate", "shard", "cp", "tp")
"""Axes of the mesh, outermost first."""


def axes_of_group(ranks: Sequence[int], axes: ParallelDims) -> str:
    """The axes along which these global ranks differ, such as "shard" or "replicate+shard"."""
    differing = []
    for number, name in enumerate(ORDER):
        stride = math.prod(getattr(axes, inner) for inner in ORDER[number + 1 :])
        if len({rank // stride % getattr(axes, name) for rank in ranks}) > 1:
            differing.append(name)
    return "+".join(differing)


def bytes_by_axis(sent: Mapping[tuple[int, ...], float], axes: ParallelDims) -> dict[str, int]:
    """``sent``: bytes by the global ranks of the group in which they were sent."""
    found: dict[str, float] = {}
    for ranks, amount in sent.items():
        name = axes_of_group(ranks, axes)
        if name:
            found[name] = found.get(name, 0.0) + amount
    return {name: round(amount) for name, amount in sorted(found.items())}
