"""Floating-point operations of a step: counted in one micro-batch of each kind, and known for all others like it.

Two micro-batches are alike if the same models are called on tensors of the same shapes, and gradients are averaged in
both or in neither. What they compute is then the same, but for models that choose by values what to compute. The first
step is left alone: compilers, rehearsals and proofs run in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from lockstep.observe.measures.operators import OperatorCounter, OperatorCounts
from lockstep.torch_internals.compile import compiled_frames

MOST_KINDS = 1000
"""Of micro-batches and calls that are counted when they first come. Of later ones, such as sentences of ever new
lengths, nothing is known."""

COUNT_AGAIN_AFTER = 1000
"""Steps after which all is counted anew: parameters may have been frozen or thawed."""


@dataclass
class StepCounts:
    """Of this rank's step. Operations: ``model``; ``hardware``, with forwards that are computed again."""

    model: float = 0
    hardware: float = 0


MicroBatch = tuple[Hashable, ...]
"""What is equal for micro-batches that compute the same: whether it averages, and the calls of its forward."""
StepKinds = tuple[list[MicroBatch], StepCounts | None]
"""The micro-batches of a step, and what the script says they compute."""


class FlopCounts:
    """Told of each training call and backward of one ``Accelerator``; counts where it does not know yet.

    Attributes:
        unknown_because: Why operations of a step could not be counted, in a sentence; "": nothing is in the way.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, OperatorCounts] = {}
        self._backwards: dict[Hashable, OperatorCounts] = {}
        self._counter: OperatorCounter | None = None
        self._stated: StepCounts | None = None
        self._in_backward: OperatorCounter | None = None
        self._depth = 0
        self._of_micro_batch: list[Hashable] = []
        self._of_step: list[MicroBatch] = []
        self._backward_now: MicroBatch = ()
        self._kinds: list[MicroBatch] = []
        self._counts: StepCounts | None = None
        self._steps = 0
        self._counted_at = 0
        self._compiled_before = compiled_frames()
        self.unknown_because = ""

    def call_begins(self, key: Hashable) -> None:
        """Begin to count a call of a model; ``key`` is equal for calls that compute the same."""
        self._depth += 1
        if self._depth > 1:
            # It is called inside of another one.
            return
        self._of_micro_batch.append(key)
        if key not in self._calls and self._may_count(self._calls):
            self._counter = OperatorCounter()
            self._counter.__enter__()

    def call_ends(self) -> None:
        """End what has begun: it returned, or raised."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
            self._remember(self._calls, self._of_micro_batch[-1], counter.counts)

    def backward_begins(self, averages: bool, may_count: bool = True) -> None:
        """Begin to count the backward of the calls since the last one. ``averages``: over ranks."""
        micro_batch = (averages, *self._of_micro_batch)
        self._of_micro_batch.clear()
        self._of_step.append(micro_batch)
        self._backward_now = micro_batch
        if micro_batch in self._backwards or not may_count or not self._may_count(self._backwards):
            return
        self._in_backward = OperatorCounter()
        self._in_backward.__enter__()

    def backward_ends(self, is_complete: bool) -> None:
        """End what has begun: it returned, or raised."""
        if self._in_backward is not None:
            counter, self._in_backward = self._in_backward, None
            counter.__exit__(None, None, None)
            if is_complete:
                self._remember(self._backwards, self._backward_now, counter.counts)

    def is_compiled(self) -> None:
        """Operations of compiled code cannot be seen, and looking on would run it in other ways."""
        self.unknown_because = (
            "Code was compiled by torch.compile, so its operations cannot be counted. Pass their number to "
            "measures.count_flops(...)."
        )

    def add_stated(self, model: float, hardware: float) -> None:
        """Take what a script says that a micro-batch of this step computes."""
        self._stated = self._stated or StepCounts()
        self._stated.model += model
        self._stated.hardware += hardware

    def step_ends(self) -> StepKinds:
        """Return what the step computed, for ``counts_of``."""
        kinds, self._of_step = self._of_step, []
        self._of_micro_batch.clear()
        self._steps += 1
        stated = self._stated
        if stated is not None:
            self._stated = None
        return kinds, stated

    def counts_of(self, step: StepKinds) -> StepCounts | None:
        """Return what a step computed that was not before ``forget_old``; None: not all of it is known."""
        kinds, stated = step
        if stated is not None and stated.model:
            return stated
        # Most steps are like the one before, whose sum is kept.
        if self._counts is None or kinds != self._kinds:
            self._kinds, self._counts = kinds, self._sum(kinds)
        return self._counts

    def forget_old(self) -> None:
        """Count all anew now and then. Called between steps."""
        if self._steps - self._counted_at > COUNT_AGAIN_AFTER:
            self._counted_at = self._steps
            self._calls.clear()
            self._backwards.clear()
            self._counts = None

    def _sum(self, micro_batches: list[MicroBatch]) -> StepCounts | None:
        total = StepCounts()
        for micro_batch in micro_batches:
            # The first entry says whether it averages; the others are its calls.
            found = [self._backwards.get(micro_batch), *(self._calls.get(key) for key in micro_batch[1:])]
            for counts in found:
                if counts is None or counts.unknown:
                    return None
                total.model += counts.model
                total.hardware += counts.model + counts.again
        return total if total.model else None

    def _may_count(self, known: Mapping[Hashable, object]) -> bool:
        if self._steps == 0 or self.unknown_because or len(known) >= MOST_KINDS:
            return False
        if compiled_frames() > self._compiled_before:
            self.is_compiled()
            return False
        return True

    def _remember(self, known: dict[Hashable, OperatorCounts], key: Hashable, counts: OperatorCounts) -> None:
        known[key] = counts
        if counts.unknown:
            self.unknown_because = (
                f"The FLOPs of {', '.join(sorted(counts.unknown))} are not known. Register a formula by "
                "torch.utils.flop_counter.register_flop_formula."
            )


def shapes_of(value: object) -> Hashable:
    """Equal for arguments of a call whose tensors have the same shapes."""
    if isinstance(value, torch.Tensor):
        return value.shape
    # Tensors are asked without a call of this function: most arguments are tensors.
    if isinstance(value, (list, tuple)):
        return tuple([one.shape if isinstance(one, torch.Tensor) else shapes_of(one) for one in value])
    if isinstance(value, Mapping):
        return tuple(value), shapes_of([*value.values()])
    return value if isinstance(value, (bool, int, str, type(None))) else id(type(value))
