"""What a step's communication costs: whether all waiting for it is seen; bytes, by axis of the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lockstep.config.parallel import Parallel
from lockstep.config.world import ParallelDims
from lockstep.parallel.parallel_model import ParallelModel


def is_seen(
    world_size: int, axes: ParallelDims, parallel: Parallel, models: Sequence[ParallelModel], device: str
) -> bool:
    """Whether all that the main thread waits for in a step, on behalf of other ranks, is in ``communication``.

    Seen are DDP's end of a backward, on every kind of device; and on CPUs what models that are sharded, or split by
    ``tp``, ``cp`` or ``ep``, send. Not seen are pipelines, what an accelerator waits for by itself, and FSDP2's
    collectives in other forms.
    """
    if world_size == 1:
        return True
    if axes.pp > 1 or not models:
        return False
    return all(model.communication_is_timed(parallel, axes, device) for model in models)


ORDER = ("pp", "replicate", "shard", "cp", "tp")
"""Axes of the mesh, outermost first."""


def axes_of_group(ranks: Sequence[int], axes: ParallelDims) -> str:
    """The axes along which these global ranks differ, such as "shard" or "replicate+shard"."""
    differing = []
    for number, name in enumerate(ORDER):
        # The last axis counts fastest: ranks that differ by ``stride`` are neighbours along this one.
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
