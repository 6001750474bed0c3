"""What the seams of a training loop tell, put together step by step."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.config.options import Options
from lockstep.config.world import ParallelDims
from lockstep.errors import UsageError
from lockstep.observe.measures.assembler import EndedStep, StepAssembler
from lockstep.observe.measures.batches import WaitingBatches
from lockstep.observe.measures.flops import FlopCounts, shapes_of
from lockstep.observe.measures.latest import latest_numbers
from lockstep.observe.measures.memory import PeakMemory
from lockstep.observe.measures.onlooker import WeakHook, look_on, look_on_calls
from lockstep.observe.measures.open_step import OpenStep, learning_rates
from lockstep.observe.measures.run_folder import RunWriter, bytes_in
from lockstep.observe.measures.start import describe
from lockstep.parallel.parallel_model import ParallelModel, is_compiled_module
from lockstep.runtime.clock import keep_time_by
from lockstep.runtime.failure import first_line
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import LoaderProgress, StepState


class StepRecorder:
    """Told by the clock, by prepared models and by methods of ``Accelerator``; a step comes out at each boundary.

    What is done in each step is kept small; ``StepAssembler`` does the rest. Belongs to the main thread, but for
    ``news``, ``saved`` and ``for_people``.
    """

    def __init__(
        self, runtime: Runtime, state: StepState, options: Options, is_restarted: bool = False
    ) -> None:
        """Begin to record; ``is_restarted``: the launcher has started this run again."""
        self._runtime = runtime
        self._state = state
        self._clock = state.clock
        self._options = options
        self._models: list[ParallelModel] = []
        self._optimizers: Sequence[Any] = ()
        self._writer: RunWriter | None = None
        # A second Accelerator of this process does not write into the same folder.
        if runtime.is_main and options.run_dir is not None and not RunWriter.has_one(options.run_dir):
            described = partial(describe, runtime, options, self._models)
            self._writer = RunWriter(options.run_dir, runtime.world_size, is_restarted, described)
        self._step = 0
        self._steps_before = self._clock.steps
        self._flops = FlopCounts()
        self._memory = PeakMemory(runtime.device)
        self._ended = StepAssembler(
            runtime, state, options, self._models, self._flops, self._memory, self._writer
        )
        self._total_steps: int | None = None
        self._training_on: LoaderProgress | None = None
        self._is_over = False
        self._is_first = True
        self._around_inference = "other"
        self._epoch: int | None = None
        self._waiting = WaitingBatches()
        self._stated_tokens: int | None = None
        self._open = OpenStep()
        self._loaded_within: dict[str, Any] | None = None
        self._parts = self._clock.parts
        self._before = self._parts.read()
        keep_time_by(self._clock)
        seams = (
            (self._clock.at_step, self.step_ends),
            (self._clock.at_batch, self.batch_comes),
            (self._clock.at_news, self.news),
        )
        close = None if self._writer is None else self._writer.folder.close
        self._look_away = look_on(self, seams, self.finish, close)
        if runtime.is_main:
            latest = WeakHook(self.for_people)
            self._clock.latest = lambda: latest() or {}

    @property
    def step(self) -> int:
        """Complete optimizer steps of this run, with those before a restart. Set it to go on from another number."""
        # A step that the optimizer has made counts before its boundary is reached.
        return self._step + (self._clock.steps > self._steps_before)

    @step.setter
    def step(self, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise UsageError(
                f"measures.step is {steps!r}, which is not a number of steps. Set it to a number of steps, 0 or more."
            )
        self._step = steps - (self._clock.steps > self._steps_before)
        self._continue_writing()

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole training, if the script has said it: set it, and whoever looks on is told how long the
        rest takes. Nothing else depends on it."""
        return self._total_steps

    @total_steps.setter
    def total_steps(self, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise UsageError(
                f"measures.total_steps is {steps!r}, which is not a number of steps. Set it to a number of steps, 1 "
                "or more."
            )
        self._total_steps = steps
        self._write_event("total", steps=steps)

    @property
    def open_samples(self) -> int | None:
        """Samples of all ranks in the step that is under way; None: not known."""
        return self._open.samples or None

    @property
    def epoch(self) -> int | None:
        """That of the latest batch that was trained on; None: not known."""
        return self._epoch

    def settled_folder(self) -> Path | None:
        """Return where this process writes, once it is settled that steps are made; None: nowhere."""
        if self._writer is None:
            return None
        self._writer.begin(continues=False)
        return self._writer.folder.path

    # -- what is prepared --------------------------------------------------------------------------------

    def optimizers_are(self, optimizers: Sequence[object], axes: ParallelDims) -> None:
        """Take the optimizers whose learning rates are read, a list that grows, and the axes of the mesh."""
        self._optimizers, self._ended.axes = optimizers, axes

    def model_prepared(self, model: ParallelModel) -> None:
        """Look on where this model is called."""
        self._models.append(model)
        if is_compiled_module(model.module) or self._options.compile_options is not None:
            self._flops.is_compiled()
        look_on_calls(model.module, self.call_begins, self.call_ends)

    def clear(self) -> None:
        """Forget what was prepared."""
        self._models.clear()

    # -- within a step -----------------------------------------------------------------------------------

    def batch_comes(self, batch: object) -> None:
        """Count a batch that a prepared loader hands out; nothing of it is kept."""
        if self._is_first:
            self._begin_first_step()
        running = self._state.running
        self._waiting.comes(running[-1] if running else None, batch)

    def call_begins(self, module: nn.Module, args: object, kwargs: object = None) -> None:
        """Note that a prepared model is called; ``kwargs`` None: in parts, between which others run."""
        if not torch.is_grad_enabled():
            self._state.clock.ticks += 1
            part = self._parts.enter("inference")
            self._around_inference = part if part != "inference" else self._around_inference
            return
        if self._is_first or not self._state.running:
            self._begin_forward()
        self._parts.enter("forward")
        if kwargs is not None:
            named = shapes_of(kwargs) if kwargs else ()
            self._flops.call_begins((id(module), module.training, shapes_of(args), named))

    def call_ends(self, *_: object) -> None:
        """Note that it has returned, or raised; a forward hook."""
        if torch.is_grad_enabled():
            self._flops.call_ends()
        else:
            self._parts.enter(self._around_inference)

    @contextmanager
    def call_in_parts(self, module: nn.Module, inputs: object) -> Iterator[None]:
        """Let a pipeline run forward and backward of parts of a batch in turn inside of the block."""
        self._begin_forward()
        self._flops.call_begins((id(module), module.training, shapes_of(inputs)))
        try:
            yield
        finally:
            self._flops.call_ends()

    def backward_begins(
        self, loss: torch.Tensor, weight: torch.Tensor | float | None, creates_graph: bool = False
    ) -> None:
        """Take a micro-batch's loss, 0-d, or with ``weight`` of any shape; ``backward_ends`` follows."""
        self._flops.backward_begins(self._state.sync_gradients, may_count=not creates_graph)
        self._open.add_loss(loss, weight)
        running = self._state.running
        progress = running[-1] if running else None
        loader = None if progress is None else progress.loader
        size = self._waiting.use(loader)
        if size is None and self._stated_tokens is None:
            # It is a second loss of the same batch.
            return
        tokens, samples = size or (None, None)
        if self._stated_tokens is not None:
            tokens, self._stated_tokens = self._stated_tokens, None
        self._open.trains_on(tokens, samples)
        self._training_on = progress
        following = getattr(loader, "epoch", None)
        # The loader counts the epoch that comes next.
        self._epoch = following - 1 if isinstance(following, int) else None

    def backward_ends(self, is_complete: bool) -> None:
        """End what has begun: it returned, or raised."""
        self._flops.backward_ends(is_complete)
        self._parts.enter("other")

    def clipped(self, norm: torch.Tensor) -> None:
        """Take the norm of all gradients before clipping, 0-d."""
        self._open.norm = norm
        if not norm.is_cpu:
            self._open.is_on_device = True

    def logged(self, values: Mapping[str, object]) -> None:
        """Keep the numbers among what the script logs."""
        self._open.log(values)

    def step_ends(self) -> None:
        """End the step, at whose boundary the main thread is, if an optimizer has stepped since the last."""
        if self._clock.steps > self._steps_before:
            self._end_step(self._parts.read())

    def for_people(self) -> dict[str, float]:
        """Return what a progress line shows of the latest step, see ``latest.py``. Any thread may call it."""
        peak = self._ended.peak
        return latest_numbers(
            list(self._ended.recent),
            None if peak is None else peak * self._runtime.world_size,
            self._total_steps,
            self._training_on,
            self._state.window_length,
        )

    # -- events ------------------------------------------------------------------------------------------

    def loaded(self, path: str, steps: int | None, seconds: float) -> None:
        """Note that a state was loaded, of so many complete steps."""
        if steps is not None:
            self.step = steps
        self._continue_writing()
        self._write_event("loaded", path=path, step=steps, seconds=seconds)

    def gone_back(self, path: str, steps: int | None, seconds: float) -> None:
        """Note that the state of so many complete steps was loaded within a step, which is the last before them."""
        self._loaded_within = {"path": path, "step": steps, "seconds": seconds, "rollback": True}

    def saved(self, path: str, seconds: float) -> None:
        """Note that a checkpoint is complete, so long after its save began. May be called by another thread."""
        if self._writer is not None:
            self._writer.event("checkpoint", step=self.step, path=path, seconds=seconds, bytes=bytes_in(path))

    def news(self, name: str, values: Mapping[str, object]) -> None:
        """Something has happened to the run; it is in the file when this returns. Called by any thread."""
        if not self._is_over:
            self._write_event(name, at_once=True, **{"step": self.step, **values})

    def finish(self, reason: str) -> None:
        """Training is over: end the last step where it was left, write what there is, and nothing after it."""
        if self._is_over:
            return
        self._is_over = True
        if self._clock.steps > self._steps_before:
            self._end_step(self._parts.read_entered())
        self._ended.finish()
        try:
            self._end_writing(reason)
        finally:
            self._look_away()

    def _end_writing(self, reason: str) -> None:
        if self._writer is None:
            return
        # At the exit of the interpreter this is the error that has ended the script.
        error = getattr(sys, "last_value", None) if reason == "exit" else None
        if isinstance(error, BaseException):
            sentence = f"{type(error).__name__}: {first_line(error)}"
            self._writer.end(self.step, reason, sentence, self._runtime.rank)
            return
        self._ended.write_peak(self.step)
        self._writer.end(self.step, reason)

    def _continue_writing(self) -> None:
        """Settle that this goes on with the run that is in the folder."""
        if self._writer is not None:
            self._writer.begin(continues=True)

    def _write_event(self, name: str, /, at_once: bool = False, **values: object) -> None:
        if self._writer is not None:
            self._writer.event(name, at_once, **values)

    # -- a step ------------------------------------------------------------------------------------------

    def _begin_first_step(self) -> None:
        """Begin with the step's batch, which has been waited for; what was before is no part of it."""
        self._is_first = False
        now = self._parts.read()
        self._before = {**now, **{part: self._before[part] for part in ("data", "to_device")}}

    def _begin_forward(self) -> None:
        if self._is_first:
            self._begin_first_step()
        self._end_step_without_loader()

    def _end_step_without_loader(self) -> None:
        """End a step, as what is done now is of the next one, where no loader says where a step ends."""
        if not self._state.running:
            self.step_ends()

    def _end_step(self, read: dict[str, float]) -> None:
        self._step += 1
        self._steps_before = self._clock.steps
        reported, self._open = self._open, OpenStep()
        # Now: in the device's queue behind this step, and before the next one.
        if reported.is_on_device:
            reported.send_numbers()
        before, self._before = self._before, read
        rates = learning_rates(self._optimizers)
        kinds = self._flops.step_ends()
        self._ended.add(EndedStep(self._step, time.time(), before, read, self._epoch, rates, kinds, reported))
        if self._loaded_within is not None:
            values, self._loaded_within = self._loaded_within, None
            self._step = self._step if values["step"] is None else values["step"]
            self._write_event("loaded", **values)
