"""Steps that have ended become ``StepMeasures``: many at once where they are short, so that few of them wait for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lockstep.config.options import Options
from lockstep.config.world import ParallelDims
from lockstep.observe.measures.communication import is_seen
from lockstep.observe.measures.flops import FlopCounts, StepCounts, StepKinds
from lockstep.observe.measures.memory import PeakMemory
from lockstep.observe.measures.open_step import OpenStep
from lockstep.observe.measures.peaks import peak_of, precision_of
from lockstep.observe.measures.run_folder import RunWriter
from lockstep.observe.measures.step import StepMeasures
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.runtime.clock import RECENT_STEPS, StepClock, difference
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import StepState

MOST_PENDING = 100
YOUNG = 10
"""Steps of a process that are told of one by one: some things are looked at in the first of them."""
WRITTEN_EVERY_S = 0.05
"""Where steps are written. What is lost with a process that is killed is no more than this, and the journal's."""
SHOWN_EVERY_S = 0.25
"""Where they are not: the latest are shown, and told to other ranks."""
PEAK_AFTER_S = 30.0
"""Of a run, after which a CPU's peak is measured: that takes 0.1% of this."""


@dataclass(slots=True)
class EndedStep:
    """What was read at the boundary behind a step; see ``StepMeasures``.

    Attributes:
        before, behind: Seconds in each part of all steps until its two boundaries.
        kinds: What it computed.
    """

    number: int
    time: float
    before: dict[str, float]
    behind: dict[str, float]
    epoch: int | None
    learning_rate: list[float] | None
    kinds: StepKinds
    reported: OpenStep


class StepAssembler:
    """Belongs to the main thread. Without a ``writer`` only the latest steps are looked at.

    Attributes:
        recent: The latest steps of which all numbers have come.
        counts: What the latest step computes on this rank; None: not known.
        axes: Of the mesh.
        optimizers: A list that grows.
    """

    def __init__(
        self,
        runtime: Runtime,
        state: StepState,
        options: Options,
        models: Sequence[ParallelModel],
        flops: FlopCounts,
        memory: PeakMemory,
        writer: RunWriter | None,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._options = options
        self._models = models
        self._flops = flops
        self._memory = memory
        self._writer = writer
        self.axes = ParallelDims()
        self.recent: deque[StepMeasures] = deque(maxlen=RECENT_STEPS)
        self._ended: deque[EndedStep] = deque(maxlen=RECENT_STEPS if writer is None else None)
        self._pending: deque[tuple[StepMeasures, OpenStep]] = deque()
        self._others = OtherRanks(state.clock, runtime.world_size)
        self._every_s = SHOWN_EVERY_S if writer is None else WRITTEN_EVERY_S
        self._young = YOUNG
        self._next = 0.0
        self.counts: StepCounts | None = None
        self._peak: float | None = None
        self._peak_is_written = False

    def add(self, step: EndedStep) -> None:
        """Take a step that has ended. Called between steps."""
        self._ended.append(step)
        now = time.monotonic()
        if self._young:
            self._young -= 1
        elif now < self._next:
            return
        self._next = now + self._every_s
        self.catch_up()
        self._flops.forget_old()

    def catch_up(self) -> None:
        """Look at all steps that have ended, and take numbers that have come late."""
        while self._ended:
            ended = self._ended.popleft()
            # What is looked at now, such as memory, is said of the latest step alone.
            self._pending.append((self._assembled(ended, is_latest=not self._ended), ended.reported))
        # In order: no step is told of before those that came before it.
        while self._pending and (self._pending[0][1].have_come() or len(self._pending) > MOST_PENDING):
            self._tell(*self._pending.popleft())

    def finish(self) -> None:
        """Tell of all steps, with what has come of their numbers."""
        self.catch_up()
        while self._pending:
            self._tell(*self._pending.popleft())

    def _tell(self, step: StepMeasures, reported: OpenStep) -> None:
        reported.write_into(step, accumulates=self._state.accumulation_steps > 1)
        self.recent.append(step)
        if self._writer is not None:
            self._writer.step(step)
            if not self._peak_is_written and step.time - self._writer.made > PEAK_AFTER_S:
                self.write_peak(step.step)

    def _assembled(self, ended: EndedStep, is_latest: bool) -> StepMeasures:
        reported = ended.reported
        self.counts = self._flops.counts_of(ended.kinds)
        own = self._own_numbers(reported)
        if is_latest:
            self._others.tell(own)
        return StepMeasures(
            step=ended.number,
            time=ended.time,
            epoch=ended.epoch,
            samples=reported.samples or None,
            tokens=self._others.of_all("tokens", own.get("tokens")),
            learning_rate=ended.learning_rate,
            seconds=self._seconds(ended),
            flops=self._flops_of_all(own),
            memory=self._memory.new() if is_latest else None,
            rank_seconds=self._others.seconds(),
            logged=reported.logged or None,
        )

    def _own_numbers(self, reported: OpenStep) -> dict[str, float]:
        """Return what the watch tells rank 0, to be added to its own."""
        own: dict[str, float] = {}
        if reported.tokens:
            # Ranks with one batch tell a share of its tokens each: the sum over all ranks has them once.
            own["tokens"] = reported.tokens * self.axes.data / self._runtime.world_size
        if self.counts is not None:
            own["model"], own["hardware"] = self.counts.model, self.counts.hardware
        return own

    def _seconds(self, ended: EndedStep) -> dict[str, float]:
        """Leave out the seconds that cannot be told apart: where pipelines run, and where not all communication is
        seen."""
        seconds = difference(ended.behind, ended.before)
        if self.axes.pp > 1:
            both = [seconds.pop(part, 0.0) for part in ("forward", "backward")]
            seconds["forward_backward"] = sum(both)
        if "communication" in seconds and not self._communication_is_seen():
            seconds["other"] = seconds.get("other", 0.0) + seconds.pop("communication")
        seconds["total"] = sum(seconds.values())
        return seconds

    def _communication_is_seen(self) -> bool:
        device = self._runtime.device.type
        return is_seen(self._runtime.world_size, self.axes, self._options.parallel, self._models, device)

    def _flops_of_all(self, own: dict[str, float]) -> dict[str, float] | None:
        model, hardware = (self._others.of_all(name, own.get(name)) for name in ("model", "hardware"))
        found: dict[str, float] = {}
        if hardware is not None:
            found["hardware"] = hardware
        # Attention over a divided sequence computes in its backward what only the whole would tell apart.
        if model is not None and self.axes.cp == 1:
            found["model"] = model
        return found or None

    # -- what the device could do ------------------------------------------------------------------------

    @property
    def peak(self) -> float | None:
        """FLOPs a second of this rank's device; None: a CPU's, which was not measured yet."""
        if self._peak is None and self._runtime.device.type != "cpu":
            self._peak = self.measured_peak()
        return self._peak

    def measured_peak(self) -> float | None:
        """Return the same; a CPU's is measured now."""
        return peak_of(self._runtime.device, self._precision())

    def _precision(self) -> str:
        parameter: nn.Parameter | None = next(
            (one for model in self._models for one in model.parameters()), None
        )
        return precision_of(self._options.mixed_precision, None if parameter is None else parameter.dtype)

    def write_peak(self, step: int) -> None:
        """Write the peak, a CPU's late: no run's start takes longer for it. Only the first call does anything."""
        if self._peak_is_written:
            return
        self._peak_is_written = True
        if self.counts is not None and self._writer is not None and not self._writer.is_closed:
            self._peak = self.measured_peak()
            self._writer.event("peak", step=step, peak_flops=self._peak, dtype=self._precision())


class OtherRanks:
    """Numbers of a step over all ranks: this one's, and of the others' latest steps what the watch tells rank 0.

    Each rank's heartbeats carry the numbers of its latest step; once a second the coordinator tells rank 0 their sums.
    """

    def __init__(self, clock: StepClock, world_size: int) -> None:
        self._clock = clock
        self._world_size = world_size

    def tell(self, own: Mapping[str, float]) -> None:
        """Let the others know this rank's numbers of its latest step, by name."""
        self._clock.own = own

    def of_all(self, name: str, own: float | None) -> float | None:
        """Return the sum over all ranks of what here is ``own``; None: some are not known."""
        if own is None or self._world_size == 1:
            return own
        sums = self._clock.others.get("sums")
        if not isinstance(sums, Mapping) or not isinstance(sums.get(name), (int, float)):
            return None
        return own + float(sums[name])

    def seconds(self) -> list[float | None] | None:
        """Return what each rank's own work of a step takes, rank by rank."""
        known = self._clock.others.get("local_s")
        if not isinstance(known, (list, tuple)) or len(known) != self._world_size:
            return None
        return [one if isinstance(one, (int, float)) else None for one in known]
