"""Where a run's tensors go: into a trace, or beside one that another run has left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from lockstep.comm.layout import ShardRegion, whole_region
from lockstep.verify.trace.file import Trace, TraceWriter, plain
from lockstep.verify.trace.items import TraceItem
from lockstep.verify.trace.measure import DistanceSums, Limit, Measured, as_pairs, compare

KEPT_BYTES = 256 << 20
"""Of tensors that differ, for a look at how."""


class Sink(Protocol):
    """Takes what this rank holds of each item.

    Attributes:
        facts: Of the run to compare with; of one that is recorded none.
    """

    facts: Mapping[str, object]

    def add(
        self, item: TraceItem, part: torch.Tensor, shape: Sequence[int], regions: Sequence[ShardRegion]
    ) -> None:
        """Add ``part``: what this rank holds of a tensor of ``shape``, of which it is ``regions``."""

    def expected_shape(self, item: TraceItem) -> tuple[int, ...] | None:
        """Return that of the whole tensor in the reference, where there is one to compare with."""

    def close(self, facts: Mapping[str, object]) -> None:
        """End the trace. ``facts``: what else is to be known of the run."""


class Recording:
    """Writes what this rank holds of each tensor of a run into a trace, and of parts which they are."""

    def __init__(self, path: Path) -> None:
        self.facts: Mapping[str, object] = {}
        self._writer = TraceWriter(path)
        self._parts: dict[str, object] = {}

    def add(
        self, item: TraceItem, part: torch.Tensor, shape: Sequence[int], regions: Sequence[ShardRegion]
    ) -> None:
        if item in self._writer:
            return
        self._writer.add(item, part)
        if tuple(part.shape) != tuple(shape):
            self._parts[item.key] = [tuple(shape), as_pairs(regions)]

    def expected_shape(self, item: TraceItem) -> tuple[int, ...] | None:
        return None

    def close(self, facts: Mapping[str, object]) -> None:
        self._writer.close({**facts, "parts": self._parts})


class TraceComparison:
    """Compares each part with a trace, and writes a line on it.

    Args:
        trace: Of the reference.
        folder: Where the lines go, ``measured-<rank>.jsonl``, and the parts that differ, ``found-<rank>.safetensors``.
        allowed: By key of an item, how far it may be from the trace; parts further away are kept. None: none are.
    """

    def __init__(
        self, trace: Trace, folder: Path, rank: int, allowed: Mapping[str, Limit] | None = None
    ) -> None:
        self.facts: Mapping[str, object] = trace.facts
        self._trace = trace
        self._rank = rank
        self._allowed = allowed
        self._lines = (folder / f"measured-{rank}.jsonl").open("w", encoding="utf-8")
        self._found = None if allowed is None else TraceWriter(folder / f"found-{rank}.safetensors")
        self._kept = 0
        self._seen: set[tuple[object, ...]] = set()

    def add(
        self, item: TraceItem, part: torch.Tensor, shape: Sequence[int], regions: Sequence[ShardRegion]
    ) -> None:
        known = (item, as_pairs(regions))
        if known in self._seen:
            return
        self._seen.add(known)
        values = plain(part)
        if not regions and not values.numel() and 0 not in shape:
            # This rank has nothing of it.
            return
        measured = self._measured(item, values, tuple(shape), regions)
        self._lines.write(measured.to_json() + "\n")
        # The judge reads these lines even if this process is killed.
        self._lines.flush()
        if self._found is None or self._allowed is None:
            return
        limit = self._allowed.get(item.key, Limit())
        if measured.is_missing or measured.shape is not None or limit.ratio(measured.sums) > 1:
            # The first ones are where to look; of a run in which all is wrong the rest would fill the disk.
            self._kept += values.nbytes
            if self._kept <= KEPT_BYTES:
                self._found.add(item, values)

    def expected_shape(self, item: TraceItem) -> tuple[int, ...] | None:
        return self._trace.shape(item) if item in self._trace else None

    def close(self, facts: Mapping[str, object]) -> None:
        self._lines.close()
        if self._found is not None:
            self._found.close(facts)

    def _measured(
        self, item: TraceItem, values: torch.Tensor, shape: tuple[int, ...], regions: Sequence[ShardRegion]
    ) -> Measured:
        pairs = as_pairs(regions)
        if item not in self._trace:
            return Measured(item, self._rank, DistanceSums(), pairs, is_missing=True)
        expected = self._trace.shape(item)
        # Complex numbers are pairs.
        if len(expected) == len(shape) + 1 and expected[-1] == 2:
            shape = expected
        if expected != shape:
            return Measured(item, self._rank, DistanceSums(), pairs, shape=shape)
        total = DistanceSums()
        for region in regions or [whole_region(shape)]:
            # A complex tensor is compared as pairs, a dimension that its regions do not have.
            if len(region.shape) < values.ndim:
                region = ShardRegion((*region.offsets, 0), (*region.shape, 2), (*region.inside, 0))
            if math.prod(region.shape):
                total += compare(region.local_view(values), self._trace.part(item, region))
        self._trace.release(item)
        return Measured(item, self._rank, total, pairs)
