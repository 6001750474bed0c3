"""How far rounding explains each tensor: from runs of the reference that were disturbed by rounding steps.

The reference runs again with its inputs and weights off by one rounding step and, where the candidate computes in half
precision, once more in that precision on one device. How far a tensor moves by that is its spread; a candidate may be a
multiple of it away. One run is one sample, so that what a tensor shows is never taken for less than what is usual:

- the median spread of its kind in that step (a loss can come back unmoved by chance), and the precision of the type;
- of gradients and updates, relative to at least a part of the usual size in that step: a gradient that is zero in
  mathematics (the bias of attention's keys, a bias before a normalisation) is nothing but rounding;
- a larger multiple for tensors of few elements, whose spread can be small by chance.

What Adam makes of gradients as small as their rounding is in ``signs.py``.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median

import torch

from lockstep.checkpoint.format.documents import validated
from lockstep.config.files import JsonObject
from lockstep.verify.judge.signs import UnknownSigns
from lockstep.verify.rounding import LARGE, MANY, MULTIPLE, SMALLEST, Rounding, bounded
from lockstep.verify.trace.file import Trace
from lockstep.verify.trace.items import ItemKind, TraceItem
from lockstep.verify.trace.measure import DistanceSums, Limit, Measured

OF_RATE = 1e-6
"""Of a learning rate, which a script computes in double precision."""
SWITCHED = 32
"""Elements that are on one side of a kink (a ReLU, a maximum, Adam's sign) in one run and on the other in the other, in
half precision, where one in a thousand is that close to it: they move a tensor of n elements by the root of this by n.
In fp32 they are so few that the judge looks at each."""
REROUTED = 4
"""Positions that go to another expert, in half precision, where a model has experts."""
SAMPLES = 8
"""That share a row of a gradient, at least."""
FLIPS = 1e-3
"""Part of the elements of integer outputs (the largest logit, chosen experts) that may be other ones."""

_WITH_KINKS = (
    ItemKind.OUTPUT,
    ItemKind.OUTPUT_GRADIENT,
    ItemKind.GRADIENT,
    ItemKind.CLIPPED,
    ItemKind.UPDATE,
)
_FLOORS = {
    **dict.fromkeys(
        (ItemKind.OUTPUT_GRADIENT, ItemKind.GRADIENT, ItemKind.CLIPPED, ItemKind.UPDATE), SMALLEST
    ),
    **dict.fromkeys((ItemKind.WEIGHT, ItemKind.OUTPUT, ItemKind.BUFFER), SMALLEST**2),
}
"""Part of the usual size in a step that is taken for the size of smaller tensors, which may be zero (LoRA's second
factor and its output)."""
_OF_MODULES = (ItemKind.OUTPUT, ItemKind.OUTPUT_GRADIENT)
UNLIMITED = Limit(math.inf, wrong=1.0)


class Tolerance(Mapping[str, Limit]):
    """By key of an item, how far it may be from the trace.

    Attributes:
        multiple: Of what rounding explains.
    """

    def __init__(self, limits: Mapping[str, Limit], multiple: float) -> None:
        self._limits = dict(limits)
        self.multiple = multiple

    def __getitem__(self, key: str) -> Limit:
        return self._limits[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._limits)

    def __len__(self) -> int:
        return len(self._limits)

    def write(self, path: Path) -> None:
        """Write it for other processes."""
        path.write_text(json.dumps(self.to_json()), "utf-8")

    def to_json(self) -> dict[str, object]:
        """Return values of JSON."""
        return {"multiple": self.multiple, "limits": self._limits}

    @classmethod
    def read(cls, path: Path) -> Tolerance:
        """Return what ``write`` wrote."""
        return cls.from_json(json.loads(path.read_text("utf-8")))

    @classmethod
    def from_json(cls, fields: JsonObject) -> Tolerance:
        """Return what ``to_json`` made. Raises ValueError: it is something else."""
        limits = validated(dict[str, Limit], fields.get("limits"), "limits")
        return cls(limits, validated(float, fields.get("multiple"), "multiple"))


def tolerance_of(
    trace: Trace,
    disturbed: Iterable[Measured],
    half: Iterable[Measured] = (),
    dtype: torch.dtype = torch.float32,
) -> Tolerance:
    """Return the tolerance of a candidate that computes in ``dtype``.

    Args:
        disturbed: The reference, off by one rounding step, compared with the trace.
        half: The reference in ``dtype``, likewise, if that has 16 bits.
    """
    limits = _ItemLimits(trace, {one.item: one for one in disturbed}, {one.item: one for one in half}, dtype)
    return Tolerance({item.key: limits.limit_of(item) for item in trace}, limits.multiple)


class _ItemLimits:
    """What is allowed of each item, by the runs that show what rounding does."""

    def __init__(
        self,
        trace: Trace,
        by_rounding: Mapping[TraceItem, Measured],
        in_half: Mapping[TraceItem, Measured],
        dtype: torch.dtype,
    ) -> None:
        self._trace = trace
        self._runs = (by_rounding, in_half)
        self._is_half = dtype in (torch.float16, torch.bfloat16)
        self._rounding = Rounding.of(dtype)
        self.multiple = self._rounding.multiple
        self._floors = _floors(by_rounding.values())
        spreads = self._spreads()
        self._usual = _usual(spreads)
        # Each micro-batch is a sample of what rounding does: the largest spread counts for all.
        self._of_batches: dict[TraceItem, float] = {}
        for item, spread in spreads.items():
            one = _of_all_batches(item)
            self._of_batches[one] = max(spread, self._of_batches.get(one, 0.0))
        self._unknown = UnknownSigns(trace, by_rounding, self._floors, self.multiple)
        self._rows = _row_counts(trace)
        outputs = {(item.name, trace.shape(item)) for item in trace if item.kind is ItemKind.OUTPUT}
        self._has_experts = any(_is_chosen(shape, self._rows) for _, shape in outputs)
        self._choices = _choices(outputs) if self._has_experts else set()

    def limit_of(self, item: TraceItem) -> Limit:
        runs = [run[item] for run in self._runs if item in run]
        # A shape that differs between runs depends on numbers that are rounded.
        if any(one.shape is not None for one in runs) or (self._is_half and self._is_rerouted(item)):
            return UNLIMITED
        if not self._trace.is_float(item):
            return _of_integers(item, [one.sums for one in runs])
        return self._of_floats(item, runs)

    def _is_rerouted(self, item: TraceItem) -> bool:
        """Return whether rounding to 16 bits can send some of its rows to another expert, which moves all behind
        them."""
        shape = self._trace.shape(item)
        if item.kind in _OF_MODULES and _is_chosen(shape, self._rows):
            return True
        # It is of the weights of what was chosen: in such a row, another expert's.
        return item.kind is ItemKind.OUTPUT_GRADIENT and (item.name, shape) in self._choices

    def _of_floats(self, item: TraceItem, runs: list[Measured]) -> Limit:
        shape = self._trace.shape(item)
        floor = self._floors.get((item.step, item.kind), 0.0)
        sums = runs[0].sums if runs else DistanceSums(elements=math.prod(shape))
        own = math.sqrt(sums.expected / sums.elements) if sums.elements else 0.0
        size = sums.size(floor) or 1.0

        spread = self._spread(item, size)
        # A rate is one number, but has no spread by chance.
        elements = math.inf if item.kind is ItemKind.RATE else sums.elements
        relative = self._rounding.allowed(spread, elements)
        if self._is_half and item.kind in _WITH_KINKS:
            relative = max(relative, _of_switched(shape, item.kind))
            if self._has_experts and item.kind in _OF_MODULES and len(shape) > 1:
                # k of n positions that are wholly other ones move it by about the root of k / n.
                relative = max(relative, min(LARGE, math.sqrt(REROUTED / math.prod(shape[:-1]))))
        relative += self._unknown.later(item)
        relative = max(relative, self._unknown.of_update(item) / size)
        relative = bounded(relative, spread, sums.elements)
        return Limit(relative, max(floor, own), _wrong(runs, self.multiple), spread)

    def _spread(self, item: TraceItem, size: float) -> float:
        """Return what rounding explains of an item of this ``size``."""
        usual = self._usual.get((item.step, item.kind), 0.0)
        own = self._of_batches.get(_of_all_batches(item))
        spread = _explained(item, own, usual, self._usual, self._rounding.least)
        if item.kind is not ItemKind.UPDATE:
            return spread
        # It is the difference of two weights, and has the rounding of both.
        of_weight = [run[weight].sums.apart for run in self._runs if (weight := _weight(item)) in run]
        return max(spread, math.sqrt(max(of_weight, default=0.0)) / size)

    def _spreads(self) -> dict[TraceItem, float]:
        """Return how far each item moved in the run that moved it most."""
        found: dict[TraceItem, float] = {}
        for item in self._trace:
            floor = self._floors.get((item.step, item.kind), 0.0)
            moved = [run[item].sums.relative(floor, wrong=1.0) for run in self._runs if item in run]
            if moved:
                found[item] = max(moved)
        return found


def _row_counts(trace: Trace) -> set[int]:
    """Return how many rows tensors have of which each belongs to a sample, or to a position of one."""
    batches = {trace.shape(item)[0] for item in trace if item.kind is ItemKind.BATCH}
    shapes = (trace.shape(item) for item in trace if item.kind is ItemKind.OUTPUT)
    return batches | {shape[0] * shape[1] for shape in shapes if len(shape) > 2 and shape[0] in batches}


def _is_chosen(shape: tuple[int, ...], rows: set[int]) -> bool:
    """Return whether the rows of a tensor are those that went to an expert: none for each sample or position."""
    return len(shape) == 2 and bool(rows) and shape[0] not in rows and shape[0] > 1


def _choices(outputs: set[tuple[str, tuple[int, ...]]]) -> set[tuple[str, tuple[int, ...]]]:
    """Return modules (name, shape) that return [positions, experts], and what they return with fewer columns beside
    it."""
    widest: dict[tuple[str, int], int] = {}
    for name, shape in outputs:
        if len(shape) == 2:
            widest[name, shape[0]] = max(shape[1], widest.get((name, shape[0]), 0))
    return {(name, shape) for name, shape in outputs if len(shape) == 2 and shape[1] < widest[name, shape[0]]}


def _of_switched(shape: tuple[int, ...], kind: ItemKind) -> float:
    """Return what elements at kinks may come to, in half precision.

    Of a parameter's gradient one of them moves a whole row, by the share of one sample.
    """
    elements = math.prod(shape)
    if not kind.is_of_micro_batch and len(shape) > 1:
        elements = min(elements, SAMPLES * shape[0])
    most = math.inf if kind is ItemKind.UPDATE and elements < MANY else LARGE
    return min(most, math.sqrt(SWITCHED / max(elements, 1)))


def _explained(
    item: TraceItem,
    own: float | None,
    usual: float,
    of_kinds: Mapping[tuple[int, ItemKind], float],
    least: float,
) -> float:
    """Return what rounding explains of an item, of which the disturbed runs show ``own``."""
    if item.kind is ItemKind.RATE:
        return max(own or 0.0, OF_RATE / MULTIPLE)
    if item.kind is ItemKind.LOSS:
        usual = max(usual, of_kinds.get((item.step, ItemKind.OUTPUT), 0.0))
    if item.kind is ItemKind.NORM:
        usual = max(usual, of_kinds.get((item.step, ItemKind.GRADIENT), 0.0))
    return max(own or 0.0, usual, least)


def _floors(measured: Iterable[Measured]) -> dict[tuple[int, ItemKind], float]:
    """Return by step and kind the root mean square that smaller tensors are taken to have."""
    sizes: dict[tuple[int, ItemKind], list[float]] = defaultdict(list)
    for one in measured:
        if one.item.kind in _FLOORS and one.sums.expected:
            sizes[one.item.step, one.item.kind].append(math.sqrt(one.sums.expected / one.sums.elements))
    return {(step, kind): _FLOORS[kind] * median(found) for (step, kind), found in sizes.items()}


def _usual(spreads: Mapping[TraceItem, float]) -> dict[tuple[int, ItemKind], float]:
    """Return the median spread of each kind in each step."""
    found: dict[tuple[int, ItemKind], list[float]] = defaultdict(list)
    for item, spread in spreads.items():
        if math.isfinite(spread):
            found[item.step, item.kind].append(spread)
    return {place: median(values) for place, values in found.items()}


def _of_integers(item: TraceItem, runs: Iterable[DistanceSums]) -> Limit:
    """Rows of batches are what they are; what a module chooses can change by rounding."""
    if item.kind is ItemKind.BATCH:
        return Limit()
    changed = max((sums.wrong / max(sums.elements, 1) for sums in runs), default=0.0)
    return Limit(math.inf, wrong=min(1.0, max(FLIPS, MULTIPLE * changed)))


def _wrong(runs: Iterable[Measured], multiple: float) -> float:
    """Part of the elements that may become infinite or NaN, as scores of experts that were not chosen do."""
    return min(1.0, multiple * max((one.sums.wrong / max(one.sums.elements, 1) for one in runs), default=0.0))


def _of_all_batches(item: TraceItem) -> TraceItem:
    """Return one name for the items of all micro-batches of a step: each is a sample of what rounding does."""
    return item._replace(micro_batch=0, data_rank=-1)


def _weight(update: TraceItem) -> TraceItem:
    """Return what an update is a change of: the difference of two weights, each of which is rounded."""
    return TraceItem(0, ItemKind.WEIGHT, update.name)
