"""The script's own loop, of which the first step is the capsule's: rank after rank, and nothing is stepped."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.accelerator import Accelerator
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.contents import CheckpointContents
from lockstep.checkpoint.format.capsule import WEIGHTS, CapsuleFacts, KeptBatch, RankCapsule
from lockstep.checkpoint.load import load_checkpoint
from lockstep.comm.collectives import Communicator
from lockstep.comm.tree import send_to_device
from lockstep.config.handlers import ProjectConfiguration
from lockstep.config.options import Options
from lockstep.data.loader import PreparedLoader
from lockstep.errors import UsageError
from lockstep.observe.run_observer import ObservedRun, RunObserver
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.replay.judge import far_outside, not_finite
from lockstep.replay.trace import MicroBatchTrace
from lockstep.replay.verdict import Compared, ReplayVerdict
from lockstep.replay.watch import ModuleWatch, in_words
from lockstep.runtime import process
from lockstep.runtime.seed import set_rng_state
from lockstep.runtime.step import BatchCounts, StepState
from lockstep.script.inside import of_one_process
from lockstep.train.clipping import clip_norm

_NOTHING = object()


@dataclass(frozen=True)
class ReplaySpec:
    """What the process that replays is to do, as a file that it reads.

    Attributes:
        output: Where it writes the verdict.
        ordinary: Steps with the loader's own batches, to compare with.
    """

    capsule: str
    output: str
    ordinary: int = 8
    as_accelerate: bool = False
    is_module: bool = False

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(vars(self)), "utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> ReplaySpec:
        return cls(**json.loads(path.read_text("utf-8")))


class ReplayedRun(RunObserver):
    """Hands the script the capsule's micro-batches, under the weights and the generators that they had.

    Raises:
        ConfigError: the capsule cannot be read.
        UsageError: it has no batches.
    """

    refuses_steps = True

    def __init__(self, spec: ReplaySpec) -> None:
        folder = Path(spec.capsule)
        self._spec = spec
        self._folder = folder
        self.facts = CapsuleFacts.read(folder)
        firsts: dict[int, int] = {}
        for rank, data_rank in enumerate(self.facts.data_ranks):
            # Other ranks of the same model had the same batches.
            firsts.setdefault(data_rank, rank)
        self._ranks = [(rank, RankCapsule.read(folder, rank)) for rank in firsts.values()]
        for _, found in self._ranks:
            if not found.batches:
                raise UsageError(
                    f"{folder} has no batches: {found.inexact} Pass the loader that training reads to "
                    "accelerator.prepare()."
                )
        self._notes = list(dict.fromkeys(found.inexact for _, found in self._ranks if found.inexact))
        self._run: ObservedRun | None = None
        self._watch = ModuleWatch()
        self._turn = 0
        self._handed = 0
        self._is_loaded = False
        self._trace: MicroBatchTrace | None = None
        self._traces: list[MicroBatchTrace] = []
        self._ordinary: list[MicroBatchTrace] = []
        self._ordinary_steps = 0
        self._losses: list[Tensor] = []
        self._compared: list[Compared] = []
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        self._norm: Tensor | None = None

    # -- what the script makes ---------------------------------------------------------------------------

    def options(self, options: Options) -> Options:
        facts = self.facts
        scaler = options.scaler
        if facts.loss_scale is not None:
            scaler = replace(scaler, init_scale=facts.loss_scale)
        return replace(
            of_one_process(options),
            mixed_precision=facts.mixed_precision,
            cpu=options.cpu or facts.device == "cpu",
            accumulation=replace(options.accumulation, num_steps=facts.accumulation_steps),
            scaler=scaler,
            spikes=None,
            run_dir=None,
            watch=False,
        )

    def begins(self, run: ObservedRun) -> None:
        self._run = run

    def model_prepared(self, model: ParallelModel) -> None:
        assert self._run is not None
        number = len(self._run.models) - 1
        self._watch.watch(model.plain, f"model_{number}." if number else "")

    def loader_prepared(self, loader: PreparedLoader) -> None:
        loader.around = self._batches_of

    # -- batches -----------------------------------------------------------------------------------------

    def _batches_of(self, loader: PreparedLoader, batches: Iterator[object]) -> Iterator[object]:
        """Yield the capsule's batches, and behind them the loader's own."""
        # The loader's first batch is read before: the capsule's get the types of its containers.
        own = next(batches, _NOTHING)
        if own is _NOTHING:
            return
        progress = loader.gradient_state.active
        assert progress is not None
        found = progress.end_of_data, progress.counts
        # A rank's turn ends in may_step, while this loop goes on with the next one's batches.
        while self._is_training() and (kept := self._next()) is not None:
            progress.end_of_data = kept.ends_data
            if kept.rows is not None and kept.real is not None:
                progress.counts = BatchCounts(tuple(kept.rows), tuple(kept.real))
            batch = like(own, kept.batch)
            self._batch_comes(batch)
            # Behind the loader, which has drawn numbers of its own.
            set_rng_state(kept.generators)
            yield batch if loader.device is None else send_to_device(batch, loader.device)
        progress.end_of_data, progress.counts = found
        self._batch_comes(own)
        yield own
        for batch in batches:
            self._batch_comes(batch)
            yield batch

    def _is_training(self) -> bool:
        return self._run is None or any(model.module.training for model in self._run.models)

    @property
    def _is_ordinary(self) -> bool:
        return self._turn == len(self._ranks)

    def _next(self) -> KeptBatch | None:
        """Return the next micro-batch of the capsule; None: there are no more."""
        if self._is_ordinary:
            return None
        rank, found = self._ranks[self._turn]
        if self._handed == len(found.batches):
            raise UsageError(
                f"The script wants more batches for this step than the {self._handed} that rank {rank} had. Replay "
                "with the script, and the arguments, of the run."
            )
        if not self._is_loaded:
            self._is_loaded = True
            self._load()
        # Ranks differ in their buffers, such as the statistics of batch normalisation.
        if not self._handed:
            self._put_buffers(found.buffers)
        self._handed += 1
        return found.batches[self._handed - 1]

    def _batch_comes(self, batch: object) -> None:
        if not self._is_training():
            self._watch.begin(None)
            return
        if self._is_ordinary:
            self._trace = MicroBatchTrace()
            self._ordinary.append(self._trace)
        else:
            self._trace = MicroBatchTrace(self._ranks[self._turn][0], self._handed - 1, batch=in_words(batch))
            self._traces.append(self._trace)
        self._watch.begin(self._trace)

    # -- the state ---------------------------------------------------------------------------------------

    def _load(self) -> None:
        assert self._run is not None
        facts, runtime = self.facts, process.current_runtime()
        assert runtime is not None
        if facts.has_weights:
            models = [model.plain for model in self._run.models]
            checkpointer = Checkpointer(
                runtime, Communicator(runtime), ProjectConfiguration(), lambda *_: None, StepState()
            )
            load_checkpoint(checkpointer, self._folder / WEIGHTS, lambda: CheckpointContents(models, {}))
            return
        accelerator = Accelerator.latest()
        if not facts.checkpoint or accelerator is None:
            raise UsageError(
                f"{self._folder} has no weights, and the run had saved no checkpoint before step {facts.step}. Let "
                "SpikePolicy keep them: capsule_weights=True."
            )
        accelerator.load_state(facts.checkpoint)
        if facts.steps_since:
            self._notes.append(
                f"The capsule has no weights: those of {facts.checkpoint} are {facts.steps_since} steps older."
            )

    def _put_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        assert self._run is not None
        for number, model in enumerate(self._run.models):
            for name, buffer in model.plain.named_buffers():
                kept = buffers.get(f"{number}.{name}")
                if kept is not None and kept.shape == buffer.shape:
                    buffer.detach().copy_(kept)

    # -- a step ------------------------------------------------------------------------------------------

    def backward_begins(self, loss: Tensor, factor: Tensor | float) -> None:
        self._watch.backward_begins(loss)
        self._losses.append(loss.detach())
        if self._trace is not None:
            numbers = loss.detach().flatten().double()
            self._trace.losses.append(float(numbers.sum()))

    def clipped(self, norm: Tensor | None) -> None:
        self._norm = norm

    def may_step(self, optimizer: Optimizer) -> bool:
        losses, self._losses = self._losses, []
        norm, self._norm = self._norm, None
        self._watch.begin(None)
        if self._is_ordinary:
            self._ordinary_steps += 1
        else:
            self._rank_ends(optimizer, losses, norm)
        if self._is_ordinary and (
            self._ordinary_steps == self._spec.ordinary or not_finite(self._traces) is not None
        ):
            self.end()
        return False

    def _rank_ends(self, optimizer: Optimizer, losses: Sequence[Tensor], norm: Tensor | None) -> None:
        rank, found = self._ranks[self._turn]
        if self._handed < len(found.batches) or len(losses) != len(found.losses):
            raise UsageError(
                f"The script made its step after {self._handed} micro-batches and {len(losses)} losses, but rank "
                f"{rank} had {len(found.batches)} and {len(found.losses)}. Replay with the script, and the arguments, "
                "of the run."
            )
        for number, (loss, (value, weight)) in enumerate(zip(losses, found.losses, strict=True)):
            if not loss.dim():
                own = loss if weight == 1 else loss * torch.tensor(weight)
                self._compared.append(Compared("loss", rank, number, value, float(own)))
        self._turn, self._handed = self._turn + 1, 0
        # Of several ranks the norm is that of their mean, which no rank's replay has.
        if len(self._ranks) == 1 and self.facts.gradient_norm is not None:
            if norm is None:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                norm = clip_norm(parameters, math.inf, 2.0, window_ended=False)
            self._compared.append(
                Compared("gradient norm", None, None, self.facts.gradient_norm, float(norm))
            )

    # -- the end -----------------------------------------------------------------------------------------

    def verdict(self) -> ReplayVerdict:
        """Return what was found. Raises UsageError: the script ended before it had made the step."""
        if not self._is_ordinary:
            raise UsageError(
                "The script ended before its first optimizer step. Replay it with arguments with which it "
                "trains."
            )
        facts = self.facts
        finding = not_finite(self._traces)
        compares = finding is None and bool(self._ordinary)
        if compares:
            finding = far_outside(self._traces, self._ordinary)
        notes = list(self._notes)
        if facts.torch != torch.__version__:
            notes.append(f"The run had torch {facts.torch}, this is {torch.__version__}.")
        bad_value = f"{facts.kind.replace('_', ' ')} {facts.value:.6g}"
        compared = tuple(self._compared)
        ordinary = len(self._ordinary) if compares else 0
        return ReplayVerdict(facts.step, bad_value, finding, compared, ordinary, tuple(notes))

    def finish(self) -> None:
        """Leave the verdict."""
        path = Path(self._spec.output)
        path.write_text(json.dumps(self.verdict().to_json()), "utf-8")

    def end(self) -> NoReturn:
        """Leave the verdict, and end this process: the script is not to go on."""
        self.finish()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def like(own: object, kept: object) -> Any:
    """Return what was kept, in containers of the types that the loader makes: a capsule has plain ones."""
    if isinstance(own, Mapping) and isinstance(kept, Mapping) and type(own) is not type(kept):
        values: dict[object, object] = {key: like(own.get(key), value) for key, value in kept.items()}
        return type(own)(values)  # type: ignore[call-arg]
    if isinstance(own, tuple) and hasattr(own, "_fields") and isinstance(kept, tuple):
        return type(own)(*map(like, own, kept))
    return kept
