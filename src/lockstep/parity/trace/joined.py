"""One trace of whole tensors, of what several ranks have recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.parity.trace.file import Trace, TraceWriter
from lockstep.parity.trace.items import TraceItem
from lockstep.parity.trace.measure import as_regions


def join_traces(paths: Sequence[Path], target: Path) -> Trace:
    """Put the parts of each tensor together; of copies the first rank's is taken. What is not whole is left out.

    Args:
        paths: By rank.
    """
    traces = [Trace(path) for path in paths]
    order: dict[TraceItem, None] = {}
    for trace in traces:
        order.update(dict.fromkeys(trace))
    writer = TraceWriter(target)
    for item in sorted(order, key=lambda item: min(t.position(item) for t in traces if item in t)):
        whole = _assemble(item, [trace for trace in traces if item in trace])
        if whole is not None:
            writer.add(item, whole)
    writer.close({**traces[0].facts, "parts": {}})
    return Trace(target)


def _assemble(item: TraceItem, traces: Sequence[Trace]) -> torch.Tensor | None:
    for trace in traces:
        if item.key not in trace.facts["parts"]:
            return trace.tensor(item)
    shape = traces[0].facts["parts"][item.key][0]
    whole, is_there = traces[0].tensor(item).new_zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for trace in traces:
        part = trace.tensor(item)
        for box in as_regions(trace.facts["parts"][item.key][1]):
            box.within(whole).copy_(box.of(part))
            box.within(is_there).fill_(True)
    return whole if bool(is_there.all()) else None
