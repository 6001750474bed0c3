"""In a trial's process: has the script's loader give other micro-batches, and takes note of what they cost."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.config.options import Options
from lockstep.config.parallel import Parallel
from lockstep.config.world import BatchSizes
from lockstep.data.loader import PreparedLoader
from lockstep.errors import UsageError
from lockstep.model.changes import UncopiedHook
from lockstep.observe.measures.batches import tokens_in
from lockstep.observe.run_observer import ObservedRun, RunObserver
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.runtime.failure import is_consequence
from lockstep.runtime.memory import is_out_of_memory
from lockstep.runtime.step import StepState
from lockstep.tune.loaders import refuse_own_batches, with_batch_size
from lockstep.tune.memory import MemoryWatch, enforce, limit_of_rank, peak_of_rank
from lockstep.tune.spec import RankReport, TrialSpec
from lockstep.verify.collect.trainers import set_window_of_trainer, window_of_trainer

OVER_LIMIT = 3
"""Exit code of a rank that ends itself because it has more memory than it may."""
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class TrialObserver(RunObserver):
    """One rank of a trial. The process ends after the steps that were asked for."""

    def __init__(self, spec: TrialSpec, rank: int) -> None:
        self._spec = spec
        self._folder = Path(spec.folder)
        self.facts = RankReport(rank=rank)
        self._step: StepState | None = None
        self._models: list[ParallelModel] = []
        self._loaders: list[DataLoader[object]] = []
        self._device = torch.device("cpu")
        self._steps_seen = 0
        self._began = time.perf_counter()
        self._is_disturbed = False
        self._rows = self._batches = self._tokens = 0
        self._loss = 0.0

    # What an Accelerator asks and tells ------------------------------------------------------------------

    def options(self, options: Options) -> Options:
        spec, facts = self._spec, self.facts
        window, steps = window_of_trainer(), options.accumulation.num_steps or 1
        facts.is_trainer = facts.uses_accumulate = window > 0
        facts.accumulation = window or steps
        facts.split_batches = bool(options.loaders.split_batches)
        parallel = options.parallel if spec.parallel is None else Parallel.parse(spec.parallel)
        options = replace(options, parallel=parallel, run_dir=None)
        if spec.accumulation is None:
            return options
        if window:
            set_window_of_trainer(spec.accumulation)
        facts.accumulation = spec.accumulation
        accumulation = replace(options.accumulation, num_steps=steps if window else spec.accumulation)
        return replace(options, batch=BatchSizes(), accumulation=accumulation)

    def begins(self, run: ObservedRun) -> None:
        if self._step is not None:
            self.refuse(
                "The script makes two Accelerators that prepare objects. Tune a script with one Accelerator."
            )
        runtime, spec = run.meshes.data_runtime, self._spec
        self._step, self._device = run.step, runtime.device
        self.facts.data_rank, self.facts.data_ranks = run.meshes.data_rank, run.meshes.data_size
        self.facts.limit = limit_of_rank(spec.memory_limit, self._device, runtime.local_world_size)
        run.step.clock.at_batch.append(self._batch_comes)
        run.step.clock.at_step.append(self._step_ends)
        if spec.memory_limit is not None:
            enforce(self.facts.limit, self._device)
        if self._device.type != "cuda":
            MemoryWatch(self.facts.limit, self._over).start()
        self._write()

    def loader_comes(self, loader: DataLoader[object]) -> DataLoader[object]:
        spec = self._spec
        if spec.micro_batch is not None and spec.loader == len(self._loaders):
            ranks = self.facts.data_ranks if self.facts.split_batches else 1
            loader = with_batch_size(loader, spec.micro_batch * ranks)
        self._loaders.append(loader)
        return loader

    def model_prepared(self, model: ParallelModel) -> None:
        self._models.append(model)
        self.facts.norms += [name for name, part in model.plain.named_modules() if isinstance(part, NORMS)]
        model.module.register_forward_pre_hook(_NotesForward(self), prepend=True, with_kwargs=True)

    def backward_begins(self, loss: Tensor, factor: Tensor | float) -> None:
        if self.facts.loader is None:
            self.refuse(
                "The script trains on batches that do not come from a loader of accelerator.prepare(). Pass a "
                "torch DataLoader to it, because its batch size is tuned."
            )
        self.facts.weighted = self.facts.weighted or isinstance(factor, Tensor)
        if not self.facts.made and loss.numel() == 1:
            self._loss += float(loss.detach()) * float(factor)

    # A step ----------------------------------------------------------------------------------------------

    def _batch_comes(self, batch: object) -> None:
        assert self._step is not None
        if not self._models or not any(model.module.training for model in self._models):
            # There is an evaluation in this step: its seconds say nothing of training.
            self._is_disturbed = True
            return
        loader = self._step.active_dataloader
        if isinstance(loader, PreparedLoader):
            self._is_trained_on(loader)
        if self._spec.accumulation is not None and not self.facts.is_trainer:
            # Scripts may set their own.
            self._step.accumulation_steps = self._spec.accumulation
        counts = self._step.counts
        self._rows += counts.total if counts is not None else 0
        self._batches += 1
        self._tokens += tokens_in(batch) or 0

    def _is_trained_on(self, loader: PreparedLoader) -> None:
        facts = self.facts
        number = next((i for i, known in enumerate(self._loaders) if known is loader.original), None)
        if number is None or number == facts.loader:
            return
        if facts.loader is not None:
            self.refuse(
                "The script trains on the batches of two loaders, so it has no single micro-batch size. Tune a "
                "script that trains on one loader."
            )
        try:
            refuse_own_batches(loader.original)
        except UsageError as error:
            self.refuse(str(error))
        facts.loader, facts.micro_batch, facts.drop_last = number, loader.batch_size, loader.drop_last
        facts.samples = _samples(loader)
        self._write()

    def forward_begins(self) -> None:
        """Count micro-batches of a loop without ``accumulate``, when a prepared model is called."""
        step = self._step
        if step is None or not any(model.module.training for model in self._models):
            return
        if step.is_in_window:
            self.facts.uses_accumulate = True
        elif not self.facts.uses_accumulate and self._spec.accumulation is not None:
            is_last = step.sync_with_dataloader and step.end_of_data
            step.sync_gradients = is_last or self._batches % self._spec.accumulation == 0

    def _step_ends(self) -> None:
        """Measure a step, when the loop asks for the batch behind it."""
        # The host runs ahead: the step is over when its kernels are.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now, facts = time.perf_counter(), self.facts
        if not facts.made:
            facts.first_loss = None if facts.weighted else self._loss
            assert self._step is not None
            if not (facts.is_trainer or self._spec.accumulation):
                facts.accumulation = self._step.accumulation_steps
        facts.made += 1
        facts.rows.append(self._rows)
        facts.batches.append(self._batches)
        facts.tokens.append(self._tokens)
        facts.seconds.append(0.0 if self._is_disturbed else now - self._began)
        self._rows = self._batches = self._tokens = 0
        self._is_disturbed = False
        self._steps_seen = self._optimizer_steps()
        if facts.made >= self._spec.steps:
            self.end()
        self._began = time.perf_counter()

    def _optimizer_steps(self) -> int:
        return 0 if self._step is None else self._step.clock.steps

    # The end ---------------------------------------------------------------------------------------------

    def _over(self, taken: int) -> None:
        self.facts.over = taken
        self._write()
        os._exit(OVER_LIMIT)

    def refuse(self, why: str) -> NoReturn:
        """End the trial of a script that cannot be tuned; every rank finds the same."""
        self.facts.refused = why
        self.end()

    def fail(self, error: BaseException) -> None:
        """Report that the script has raised ``error``, unless it follows from the end of another rank."""
        if is_consequence(error):
            self._write()
            return
        self.facts.failed = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        self.facts.out_of_memory = is_out_of_memory(error)
        self._write()

    def finish(self) -> None:
        """Report that the script has come to its end."""
        # The last step has no batch behind it that would end it.
        if self._optimizer_steps() > self._steps_seen and self._batches:
            self._step_ends()
        self._write()

    def end(self) -> NoReturn:
        """End this process: other ranks may do without it, as none is in a collective."""
        self._write()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _write(self) -> None:
        self.facts.peak = peak_of_rank(self._device)
        self.facts.write(self._folder)


class _NotesForward(UncopiedHook):
    """A forward pre-hook, which pipelines call without keywords."""

    def __init__(self, observer: TrialObserver) -> None:
        self._observer = observer

    def __call__(self, module: nn.Module, args: object, kwargs: object = None) -> None:
        self._observer.forward_begins()


def _samples(loader: PreparedLoader) -> int | None:
    try:
        return len(loader.original.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
