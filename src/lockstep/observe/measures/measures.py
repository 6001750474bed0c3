"""What a run does, measured in every step: where its time goes, and how much it trains."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from lockstep.config.options import Options
from lockstep.errors import UsageError
from lockstep.model.changes import UncopiedHook
from lockstep.observe.measures.late import LateNumbers, is_plain_number
from lockstep.observe.measures.parts import Parts, difference
from lockstep.observe.measures.run_folder import RunFolder, bytes_in
from lockstep.observe.measures.start import describe
from lockstep.observe.measures.step import StepMeasures
from lockstep.observe.measures.tokens import tokens_in
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.runtime.failure import first_line
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import RECENT_STEPS, StepState

MOST_GROUPS = 8
MOST_PENDING = 100
PREFIX = "lockstep/"


class Measures:
    """Measures of the steps of one ``Accelerator``, on this rank; rank 0 also writes them to the run's folder.

    A step is one of the optimizer, with all micro-batches of its window. It begins and ends where the loop asks a
    prepared loader for a batch after an optimizer step; in a loop without one, at the first forward after that. Rates
    and means are those of the latest 50 steps. What cannot be known is None, or absent.

    Nothing is sent between ranks for it, and no device is waited for. Made by the ``Accelerator``, which hands it out
    as ``accelerator.measures``.
    """

    _writers: ClassVar[weakref.WeakValueDictionary[Path, Measures]] = weakref.WeakValueDictionary()

    def __init__(
        self,
        runtime: Runtime,
        state: StepState,
        options: Options,
        is_restarted: bool = False,
    ) -> None:
        """``is_restarted``: the launcher has started this run again."""
        self._runtime = runtime
        self._state = state
        self._clock = state.clock
        self._options = options
        self._is_restarted = is_restarted
        self._made = time.time()
        folder = options.run_dir
        writes = runtime.rank == 0 and folder is not None and folder not in Measures._writers
        self._folder = RunFolder(folder if writes else None)
        if writes and folder is not None:
            Measures._writers[folder] = self
        self._models: Sequence[ParallelModel] = ()
        self._optimizers: Sequence[Any] = ()
        self._step = 0
        self._steps_before = self._clock.steps
        self._recent: deque[StepMeasures] = deque(maxlen=RECENT_STEPS)
        self._pending: deque[tuple[StepMeasures, LateNumbers, int]] = deque()
        self._is_over = False
        self._is_first = True
        self._around_inference = "other"
        self._gradient_norm: torch.Tensor | None = None
        self._begin_step()
        self._epoch: int | None = None
        self._tokens_of_batch: int | None = None
        self._is_new_batch = False
        self._parts = self._watch()
        self._before = self._parts.read()

    def _watch(self) -> Parts:
        clock = self._clock
        if not isinstance(clock.parts, Parts):
            clock.parts = Parts()
        this = weakref.ref(self)

        def step_ends() -> None:
            if (measures := this()) is not None:
                measures.step_ends()

        def batch_comes(batch: object) -> None:
            if (measures := this()) is not None:
                measures.batch_comes(batch)

        clock.at_step.append(step_ends)
        clock.at_batch.append(batch_comes)

        def at_exit() -> None:
            if (measures := this()) is not None:
                measures.finish("exit")

        atexit.register(at_exit)

        def forget(folder: RunFolder) -> None:
            clock.at_step.remove(step_ends)
            clock.at_batch.remove(batch_comes)
            atexit.unregister(at_exit)
            folder.close()

        weakref.finalize(self, forget, self._folder)
        return clock.parts

    # -- what people read --------------------------------------------------------------------------------

    @property
    def latest(self) -> StepMeasures | None:
        """The latest complete step of which all numbers have come; None before the first."""
        self._take_late()
        return self._recent[-1] if self._recent else None

    @property
    def step(self) -> int:
        """Complete optimizer steps of this run, with those before a restart. Set it to go on from another number."""
        return self._step + (self._clock.steps > self._steps_before)

    @step.setter
    def step(self, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise UsageError(f"measures.step is {steps!r}, but must be 0 or more steps.")
        self._step = steps - (self._clock.steps > self._steps_before)
        self._begin_writing(continues=True)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by part, and ``total``: means of the latest steps."""
        found = [each.seconds for each in self._recent if each.seconds is not None]
        names = {name for seconds in found for name in seconds}
        return {name: sum(each.get(name, 0.0) for each in found) / len(found) for name in sorted(names)}

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step: mean of the latest."""
        return self.seconds.get("total")

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all ranks that are trained on in a second."""
        return self._rate(lambda each: each.samples)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all ranks that are trained on in a second. See ``count_tokens``."""
        return self._rate(lambda each: each.tokens)

    @property
    def folder(self) -> Path | None:
        """Where this process writes; None: nowhere."""
        return self._folder.path

    def numbers(self) -> dict[str, float]:
        """The latest numbers under the names that trackers get: ``lockstep/tokens_per_second`` and others."""
        found: dict[str, float | None] = {
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            **{f"seconds/{part}": value for part, value in self.seconds.items() if part != "total"},
        }
        return {PREFIX + name: value for name, value in found.items() if value is not None}

    # -- what a script tells -----------------------------------------------------------------------------

    def count_tokens(self, tokens: int) -> None:
        """Say how many tokens this rank trains on in a micro-batch; call it before ``backward``.

        Without it they are the elements of the batch's ``input_ids``, padding included.
        """
        self._tokens_of_batch = tokens
        self._is_new_batch = True

    def event(self, name: str, **values: Any) -> None:
        """Write an event of the script's own to ``events.jsonl``, with values that JSON has."""
        self._folder.event(name, step=self.step, **values)

    # -- what the seams tell -----------------------------------------------------------------------------

    def model_prepared(self, model: ParallelModel) -> None:
        """Look on where this model is called."""
        model.module.register_forward_pre_hook(_BeforeCall(self), with_kwargs=True)
        model.module.register_forward_hook(_AfterCall(self))

    def objects_are(self, models: Sequence[ParallelModel], optimizers: Sequence[Any]) -> None:
        """What is prepared, and whose learning rates are read: lists that grow."""
        self._models, self._optimizers = models, optimizers

    def batch_comes(self, batch: object) -> None:
        """A prepared loader hands out this batch, of which nothing is kept."""
        if self._is_first:
            self._begin_first_step()
        self._tokens_of_batch = tokens_in(batch)
        self._is_new_batch = True

    def call_begins(self) -> None:
        """A prepared model is called."""
        if not torch.is_grad_enabled():
            part = self._parts.enter("inference")
            self._around_inference = part if part != "inference" else self._around_inference
            return
        if self._is_first:
            self._begin_first_step()
        if self._clock.steps > self._steps_before and not self._state.running:
            self.step_ends()  # no loader says where a step ends
        self._parts.enter("forward")

    def inference_ends(self) -> None:
        """A call without gradients is over."""
        self._parts.enter(self._around_inference)

    def backward_begins(self, loss: torch.Tensor, weight: torch.Tensor | float | None) -> None:
        """A micro-batch's loss, 0-d, or with ``weight`` of any shape."""
        if is_plain_number(loss):
            self._losses.append(loss.detach())
        elif weight is not None and type(loss) is torch.Tensor:
            weights = torch.as_tensor(weight, device=loss.device).expand_as(loss)
            with torch.no_grad():
                self._losses.append((loss.detach() * weights).sum() / weights.sum())
        if not self._is_new_batch:
            return  # a second loss of the same batch
        self._is_new_batch = False
        if self._tokens_of_batch is not None:
            self._tokens += self._tokens_of_batch
        else:
            self._has_all_tokens = False
        counts = self._state.counts
        if counts is not None:
            self._samples += counts.total
        else:
            self._has_all_samples = False
        loader: Any = self._state.active_dataloader
        following = getattr(loader, "epoch", None)
        self._epoch = following - 1 if isinstance(following, int) else None

    def clipped(self, norm: torch.Tensor) -> None:
        """The norm of all gradients before clipping, 0-d."""
        self._gradient_norm = norm

    def logged(self, values: Mapping[str, object]) -> None:
        """Numbers among what the script logs."""
        for name, value in values.items():
            if isinstance(value, Real) or (is_plain_number(value) and value.device.type == "cpu"):  # type: ignore[attr-defined]
                self._logged[str(name)] = float(value)  # type: ignore[arg-type]

    def step_ends(self) -> None:
        """The main thread is at the boundary of a step, if an optimizer has stepped since the last."""
        if self._clock.steps > self._steps_before:
            self._end_step(self._parts.read())

    def finish(self, reason: str) -> None:
        """Training is over: end the last step where it was left, write what there is, and nothing after it."""
        if self._is_over:
            return
        self._is_over = True
        if self._clock.steps > self._steps_before:
            self._end_step(self._parts.read_entered())
        while self._pending:
            self._write(*self._pending.popleft())
        error = getattr(sys, "last_value", None) if reason == "exit" else None
        if isinstance(error, BaseException) and (self._is_restarted or not self._folder.has_steps):
            self._begin_writing(continues=True)  # it failed before its first step
        if isinstance(error, BaseException) and self._folder.has_begun:
            sentence = f"{type(error).__name__}: {first_line(error)}"
            self._folder.event("error", step=self.step, sentence=sentence, rank=self._runtime.rank)
            reason = "error"
        if self._folder.has_begun:
            self._folder.event("end", step=self.step, reason=reason)
        self._folder.close()
        path = self._folder.path
        if path is not None and Measures._writers.get(path) is self:
            del Measures._writers[path]

    def loaded(self, path: str, steps: int | None, seconds: float) -> None:
        """A state was loaded, of so many complete steps."""
        if steps is not None:
            self.step = steps
        self._begin_writing(continues=True)
        self._folder.event("loaded", path=path, step=steps, seconds=seconds)

    def saved(self, path: str, seconds: float) -> None:
        """A checkpoint is complete, so long after its save began. May be called by another thread."""
        self._folder.event("checkpoint", step=self.step, path=path, seconds=seconds, bytes=bytes_in(path))

    # -- a step ------------------------------------------------------------------------------------------

    def _begin_first_step(self) -> None:
        """It begins with its batch, which has been waited for; what was before is no part of it."""
        self._is_first = False
        now = self._parts.read()
        self._before = {**now, **{part: self._before[part] for part in ("data", "to_device")}}

    def _begin_step(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._gradient_norm = None
        self._tokens, self._samples = 0, 0
        self._has_all_tokens = self._has_all_samples = True
        self._logged: dict[str, float] = {}

    def _end_step(self, read: dict[str, float]) -> None:
        seconds = difference(read, self._before)
        seconds["total"] = sum(seconds.values())
        self._before = read
        self._step += 1
        self._steps_before = self._clock.steps
        step = StepMeasures(
            step=self._step,
            time=time.time(),
            epoch=self._epoch,
            samples=self._samples if self._has_all_samples and self._samples else None,
            tokens=self._tokens_of_all(),
            learning_rate=self._learning_rates(),
            seconds=seconds,
            logged=self._logged or None,
        )
        norm = [] if self._gradient_norm is None else [self._gradient_norm]
        late = LateNumbers([*self._losses, *norm])
        self._pending.append((step, late, len(self._losses)))
        self._begin_step()
        self._take_late()

    def _take_late(self) -> None:
        while self._pending and (self._pending[0][1].have_come() or len(self._pending) > MOST_PENDING):
            self._write(*self._pending.popleft())

    def _write(self, step: StepMeasures, late: LateNumbers, losses: int) -> None:
        numbers = late.read()
        known = [number for number in numbers[:losses] if number is not None]
        if known and len(known) == losses:
            step.loss = sum(known) / losses
        if len(numbers) > losses:
            step.gradient_norm = numbers[losses]
        self._recent.append(step)
        self._begin_writing(continues=False)
        if self._folder.path is not None:
            self._folder.step(step.line())

    def _begin_writing(self, continues: bool) -> None:
        folder = self._folder
        if folder.has_begun or folder.path is None:
            return
        before = folder.begin(continues or self._is_restarted)
        if before:
            reason = "restarted by the launcher" if self._is_restarted else "started again"
            folder.event("restart", reason=reason, world_size=self._runtime.world_size)
        described = describe(self._runtime, self._options, self._models)
        folder.event("start", **{**described, "time": self._made})

    def _tokens_of_all(self) -> float | None:
        if not self._has_all_tokens or not self._tokens or self._runtime.world_size > 1:
            return None
        return self._tokens

    def _learning_rates(self) -> list[float] | None:
        found: list[float] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                if isinstance(rate, float | int) or (is_plain_number(rate) and rate.device.type == "cpu"):
                    found.append(float(rate))
                if len(found) == MOST_GROUPS:
                    return found
        return found or None

    def _rate(self, amount: Callable[[StepMeasures], float | None]) -> float | None:
        self._take_late()
        pairs = [
            (value, each.seconds["total"])
            for each in self._recent
            if each.seconds is not None and (value := amount(each)) is not None
        ]
        seconds = sum(total for _, total in pairs)
        return sum(value for value, _ in pairs) / seconds if seconds else None


class _BeforeCall(UncopiedHook):
    """A forward pre-hook, which pipelines call without keywords."""

    def __init__(self, measures: Measures) -> None:
        self._measures = weakref.ref(measures)

    def __call__(self, module: nn.Module, args: object, kwargs: object = None) -> None:
        measures = self._measures()
        if measures is not None:
            measures.call_begins()


class _AfterCall(UncopiedHook):
    """A forward hook: what follows a training forward belongs to it until backward; inference ends here."""

    def __init__(self, measures: Measures) -> None:
        self._measures = weakref.ref(measures)

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        measures = self._measures()
        if measures is not None and not torch.is_grad_enabled():
            measures.inference_ends()
