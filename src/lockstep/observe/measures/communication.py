"""What a step's communication costs: in time, waited for and hidden; in bytes, by axis of the mesh."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from lockstep.config.parallel import Parallel
from lockstep.config.world import ParallelDims
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.torch_internals.c10d import ReducerTimes

EVERY_S = 1.0
"""How often DDP's times are read, which takes 0.1 ms."""


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


class HiddenCommunication:
    """Seconds in which DDP's averages travelled while its backward computed, as torch measures them.

    torch measures the first ten backwards of a model in which ranks communicate, and every hundredth after them.
    """

    def __init__(self, models: Sequence[ParallelModel]) -> None:
        self._models = models
        self._next = 0.0
        self._latest: list[ReducerTimes] = []

    def new(self) -> float | None:
        """Called at the end of each step: of the latest backward that was measured, if that is another than before."""
        now = time.monotonic()
        if now < self._next or not self._models:
            return None
        found = [times for model in self._models if (times := model.reducer_times()) is not None]
        if len(found) < len(self._models):
            self._next = now + EVERY_S
            return None
        if any(times.iteration == 0 for times in found):
            return None
        self._next = now + EVERY_S
        if found == self._latest:
            return None
        self._latest = found
        return sum(times.hidden for times in found)


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
