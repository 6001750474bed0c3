"""Updates that rounding turns around.

Adam's first update is the learning rate times the sign of the gradient. Elements whose gradient is as small as its
rounding have updates of any sign. They are so few that the disturbed run need not show one: they are counted in the
trace, in the update and in what that changes in later steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from lockstep.verify.trace.file import Trace
from lockstep.verify.trace.items import ItemKind, TraceItem
from lockstep.verify.trace.measure import Measured

SEEN = 0.1
"""Of what updates of unknown sign can come to: where the disturbed run shows more, it shows what comes of them too."""


class UnknownSigns:
    """Elements of gradients hardly larger than their rounding, whose update by Adam can have either sign.

    Args:
        disturbed: The reference, off by one rounding step, compared with the trace.
        floors: By step and kind, the root mean square that smaller tensors are taken to have.
        multiple: Of what that run shows of a gradient, by which its elements may be off.
    """

    def __init__(
        self,
        trace: Trace,
        disturbed: Mapping[TraceItem, Measured],
        floors: Mapping[tuple[int, ItemKind], float],
        multiple: float,
    ) -> None:
        self._disturbed = disturbed
        self._floors = floors
        self._updates: dict[TraceItem, float] = {}
        self._moved: dict[int, float] = defaultdict(float)
        weights = {item.name: one.sums for item, one in disturbed.items() if item.kind is ItemKind.WEIGHT}
        elements = sum(sums.elements for sums in weights.values())
        usual = math.sqrt(sum(sums.expected for sums in weights.values()) / elements) if elements else 0.0
        of_names: dict[str, list[TraceItem]] = defaultdict(list)
        for item in trace:
            if item.kind is ItemKind.UPDATE and trace.is_float(item):
                of_names[item.name].append(item)
        for name, updates in of_names.items():
            for item, apart in self._apart(trace, sorted(updates), multiple):
                self._updates[item] = apart
                is_seen = item in disturbed and disturbed[item].sums.apart > (SEEN * apart) ** 2
                if name in weights and not is_seen:
                    size = weights[name].size(usual) or 1.0
                    self._moved[item.step] += (apart / size) ** 2

    def of_update(self, item: TraceItem) -> float:
        """Return how far an update may be off by them: a norm."""
        return self._updates.get(item, 0.0)

    def later(self, item: TraceItem) -> float:
        """Return how far what comes after those updates may be off by them: a relative distance.

        Weights that are off by more than one rounding step move an item by as many times more than the disturbance did
        in the first step.
        """
        # In the first step nothing has come of an update yet.
        if item.step < 2 or item.kind is ItemKind.RATE:
            return 0.0
        moved = math.sqrt(sum(moved for step, moved in self._moved.items() if step < item.step))
        in_first = self._disturbed.get(item._replace(step=1))
        if not moved or in_first is None:
            return 0.0
        spread = in_first.sums.relative(self._floors.get((1, item.kind), 0.0), wrong=1.0)
        # The disturbance was one rounding step of each weight, eps / 2 of its size.
        return moved / (torch.finfo(torch.float32).eps / 2) * spread

    def _apart(
        self, trace: Trace, updates: list[TraceItem], multiple: float
    ) -> Iterator[tuple[TraceItem, float]]:
        """Yield the norm of what gradients' rounding can change of the updates of one parameter, step by step."""
        largest_so_far: torch.Tensor | None = None
        for update in updates:
            of_gradient = [update._replace(kind=kind) for kind in (ItemKind.CLIPPED, ItemKind.GRADIENT)]
            gradient = next((item for item in of_gradient if item in trace and item in self._disturbed), None)
            if gradient is None or trace.shape(gradient) != trace.shape(update):
                continue
            sums = self._disturbed[gradient].sums
            # What an element's gradient may be off by: the root mean square over all, times the multiple.
            rounding = multiple * math.sqrt(sums.apart / max(sums.elements, 1))
            sizes = trace.tensor(gradient).double().abs().reshape(-1)
            # Momentum keeps the sign that a larger gradient of an earlier step has given.
            sizes = sizes if largest_so_far is None else torch.maximum(sizes, largest_so_far)
            largest_so_far = sizes
            if rounding and len(sizes):
                yield update, _changed(sizes, trace.tensor(update).double().abs().reshape(-1), rounding)


def _changed(gradient: torch.Tensor, update: torch.Tensor, rounding: float) -> float:
    """Return the norm by which an update changes if its gradient does by ``rounding``; both are sizes of elements.

    Adam's first update is u = r g / (|g| + e), so that du = u (dg / g) (1 - |u| / r). An update in proportion to its
    gradient changes by no more than that without the last factor, which is 1 for small ones.
    """
    most = float(update.max())
    if not most:
        return 0.0
    slope = update * (rounding / gradient.clamp(min=rounding)) * (1 - update / most)
    small = (gradient > 0) & (gradient <= rounding)
    if bool(small.any()):
        # The next element above them shows how large an update of such a gradient gets.
        above = torch.where(gradient > rounding, gradient, math.inf).argmin()
        turned = update + max(float(update[small].max()), float(update[above]))
        slope = torch.where(small, turned, slope)
    return float(torch.where(gradient > 0, slope, 0.0).norm())
