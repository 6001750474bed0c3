"""Capsules of bad steps: what ranks train on is kept while a step is under way, and written where it is a spike."""

from __future__ import annotations

import logging
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.checkpoint.contents import CheckpointContents
from lockstep.checkpoint.format.capsule import WEIGHTS, CapsuleFacts, KeptBatch, RankCapsule
from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.comm.tree import map_tensors
from lockstep.config.handlers import ProjectConfiguration
from lockstep.config.options import Options
from lockstep.config.spikes import SpikePolicy
from lockstep.observe.spikes.bad_step import BadStep
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.runtime.mesh import DeviceMeshes
from lockstep.runtime.process import Runtime
from lockstep.runtime.seed import rng_state
from lockstep.runtime.step import StepState
from lockstep.torch_internals import tensors as torch_tensors

if TYPE_CHECKING:
    from lockstep.checkpoint.checkpointer import Checkpointer

logger = logging.getLogger("lockstep.spikes")

CAPSULES = "capsules"


class StepKeeper:
    """Keeps what this rank trains on until its step is made; of a bad one it makes a capsule.

    Each micro-batch is copied, because a script may change it in place. Of buffers those are copied that have changed
    in place; running statistics of batch normalisation, which training does not read, do not say that they have.

    Args:
        models: The prepared ones: a list that grows.
        loaders: How many loaders are prepared.
        folder: The run's folder on rank 0; None: there is none.
        facts: What is to be said of the run in each capsule.
    """

    def __init__(
        self,
        policy: SpikePolicy,
        communicator: Communicator,
        meshes: DeviceMeshes,
        step: StepState,
        models: list[ParallelModel],
        loaders: Callable[[], int],
        contents: Callable[[], CheckpointContents],
        folder: Callable[[], Path | None],
        facts: Callable[[], dict[str, object]],
    ) -> None:
        self._policy = policy
        self._communicator = communicator
        self._meshes = meshes
        self._step = step
        self._models = models
        self._loaders = loaders
        self._contents = contents
        self._folder = folder
        self._facts = facts
        self._checkpointer: Checkpointer | None = None
        # Handed out, and not trained on yet; and those of the step that is under way.
        self._handed: deque[KeptBatch] = deque()
        self._batches: list[KeptBatch] = []
        self._buffers: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}
        step.clock.at_batch.append(self.batch_comes)

    # -- while a step is under way -----------------------------------------------------------------------

    def batch_comes(self, batch: object) -> None:
        """Keep a batch that a prepared loader hands out."""
        if self._models and not any(model.module.training for model in self._models):
            return  # an evaluation
        if not self._batches and not self._handed:
            self._copy_changed_buffers()
        progress, counts = self._step.active, self._step.counts
        self._handed.append(
            KeptBatch(
                map_tensors(torch.Tensor.clone, batch),
                rng_state(),
                progress is not None and progress.end_of_data,
                None if counts is None else list(counts.rows),
                None if counts is None else list(counts.real),
            )
        )
        longest = max(1, self._step.accumulation_steps) * max(1, self._loaders())
        while len(self._handed) > longest:  # an evaluation of a model in training mode
            self._handed.popleft()

    def backward(self) -> None:
        """Keep what was handed out as what is trained on."""
        self._batches += self._handed
        self._handed.clear()

    def forget(self) -> None:
        """Forget what was kept: the step is made, or is none."""
        self._batches.clear()

    def _copy_changed_buffers(self) -> None:
        """Copy those that have changed since they were copied."""
        for number, model in enumerate(self._models):
            for name, buffer in model.plain.named_buffers():
                if buffer.is_meta or buffer.is_inference():
                    continue
                version, key = torch_tensors.version(buffer), f"{number}.{name}"
                known = self._buffers.get(key)
                if known is None or known[0] is not buffer or known[1] != version:
                    self._buffers[key] = (buffer, version, buffer.detach().clone())

    # -- a bad step --------------------------------------------------------------------------------------

    def keep(self, bad: BadStep) -> str | None:
        """Write a capsule; returns its folder, None: there is none. Collective.

        A capsule that cannot be written is warned about, and does not end training.
        """
        # From rank 0 to all: the run's folder.
        folder = self._communicator.gather_object([self._folder()])[0]
        if folder is None or not self._policy.capsules:
            return None
        try:
            return str(self._write(Path(folder) / CAPSULES, bad))
        except Exception as error:  # all ranks have agreed that one of them has failed
            if self._communicator.runtime.is_main:
                logger.warning("No capsule of step %d was kept: %s", bad.step, error)
            return None

    def _write(self, root: Path, bad: BadStep) -> Path:
        communicator, rank = self._communicator, self._communicator.runtime.rank
        is_main = communicator.runtime.is_main
        name = f"step-{bad.step:06d}"
        target, staging = root / name, root / f".{name}.partial"

        # From each rank to all: whether it is ready; then whose batches it trains on.
        with raise_on_all_ranks(communicator):
            if is_main:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
        data_ranks = communicator.gather_object([self._meshes.data_rank])

        # From each rank to all: whether it has written its part.
        with raise_on_all_ranks(communicator):
            inexact = "" if self._batches else "The batches of this step do not come from a prepared loader."
            # Those that had changed: the others are what the script makes.
            buffers = {key: copy for key, (_, version, copy) in self._buffers.items() if version}
            RankCapsule(self._batches, bad.losses, buffers, inexact).write(staging, rank)

        # What a save of the models tells.
        if self._policy.capsule_weights:
            self._save_weights(staging / WEIGHTS)

        # From each rank to all: whether rank 0 has published it.
        with raise_on_all_ranks(communicator):
            if is_main:
                facts = {**asdict(bad), "data_ranks": tuple(data_ranks), **self._facts()}
                del facts["losses"]
                CapsuleFacts(**facts, has_weights=self._policy.capsule_weights).write(staging)
                shutil.rmtree(target, ignore_errors=True)
                staging.rename(target)
                for older in sorted(root.glob("step-*"), key=_time_written)[: -self._policy.capsules]:
                    shutil.rmtree(older, ignore_errors=True)
        return target

    def _save_weights(self, directory: Path) -> None:
        from lockstep.checkpoint.checkpointer import Checkpointer  # with pydantic, which a run may never need
        from lockstep.checkpoint.save import save_checkpoint

        if self._checkpointer is None:
            self._checkpointer = Checkpointer(
                self._communicator.runtime,
                self._communicator,
                ProjectConfiguration(),
                lambda *_: None,
                self._step,
            )
        save_checkpoint(self._checkpointer, directory, lambda: replace(self._contents(), parts={}), {})


def _time_written(folder: Path) -> float:
    return folder.stat().st_mtime


def facts_of_run(options: Options, step: StepState, runtime: Runtime) -> dict[str, object]:
    """Return what capsules say of how a run is made."""
    return {
        "parallel": str(options.parallel),
        "mixed_precision": str(options.mixed_precision),
        "accumulation_steps": step.accumulation_steps,
        "device": runtime.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
