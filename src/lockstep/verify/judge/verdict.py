"""What came of a comparison."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from lockstep.verify.trace.items import ItemKind, TraceItem


@dataclass(frozen=True)
class RunFacts:
    """How the reference and the candidate were run.

    Attributes:
        reference: Its strategy in words; "": one process.
        candidate: Likewise: "zero=3 tp=2".
        nproc: Ranks of the candidate.
        data_ranks: How many of them have batches of their own.
        accumulation_steps: Micro-batches of a step, on each rank.
        axes: The size of each axis along which ranks compute one batch together: {"tp": 2}.
        dtype: The candidate computes in: "fp32", "bf16" or "fp16".
        steps_asked: Optimizer steps that were asked for.
        steps_compared: Those that both runs made.
        notes: Sentences for the end of the report: "Dropout was off in both runs."
    """

    reference: str = ""
    candidate: str = ""
    nproc: int = 1
    data_ranks: int = 1
    accumulation_steps: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "fp32"
    steps_asked: int = 0
    steps_compared: int = 0
    notes: tuple[str, ...] = ()


class Fault(Enum):
    """What is wrong with an item."""

    DIFFERS = "differs"
    MISSING = "missing"
    """No rank has it."""
    ADDED = "added"
    """The reference has none such."""
    SHAPE = "shape"
    STEP = "step"
    """A step that only one run made."""


@dataclass(frozen=True)
class Mismatch:
    """One item that does not agree.

    Attributes:
        ranks: On which it does not.
        holders: Ranks that have it, or a part of it.
        distance: Relative to the norm of what is expected.
        spread: The distance that rounding explains.
        allowed: A multiple of that.
        factor: Times the reference, it is what was found, where there is such a number.
        shapes: As found and as expected, of another shape.
        numbers: As found and as expected, of one element.
        looks_like: A sentence, where the difference has a known shape.
    """

    item: TraceItem
    fault: Fault
    ranks: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()
    distance: float = math.inf
    spread: float = 0.0
    allowed: float = 0.0
    factor: float | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    numbers: tuple[float, float] | None = None
    looks_like: str = ""


@dataclass(frozen=True)
class Ratio:
    """How far an item is, by how far it may be; ``distance`` itself relative to the norm of what is expected."""

    item: TraceItem
    ratio: float
    distance: float


@dataclass(frozen=True)
class ParityVerdict:
    """What came of a comparison.

    Attributes:
        multiple: Of what rounding explains, that was allowed.
        ratios: Of every item that was compared, in the order of the run.
        findings: In the order of the run; the first one is where to look.
        agree_before: How many items before the first finding agree.
        notes: Sentences on what was not compared, and why.
    """

    facts: RunFacts
    multiple: float
    ratios: tuple[Ratio, ...]
    findings: tuple[Mismatch, ...]
    agree_before: int
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        return not self.findings

    @property
    def compared(self) -> dict[ItemKind, int]:
        """How many items of each kind were compared."""
        found = Counter(one.item.kind for one in self.ratios)
        return {kind: found[kind] for kind in ItemKind if found[kind]}

    @property
    def largest(self) -> Ratio | None:
        """Of those that agree."""
        agreeing = [one for one in self.ratios if one.ratio <= 1]
        return max(agreeing, key=lambda one: one.ratio, default=None)
