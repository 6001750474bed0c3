"""Methods of ``Accelerator`` for checkpoints: the whole state saved and loaded, and a save before a stop."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from torch.utils.hooks import RemovableHandle

from lockstep.checkpoint.contents import (
    CheckpointContents,
    LoadHook,
    SaveHook,
    checked_stateful,
    refuse_options,
)
from lockstep.errors import UsageError
from lockstep.observe.run_observer import RunObserver
from lockstep.preparation.parts import AcceleratorParts
from lockstep.user_call import one_rank_line

if TYPE_CHECKING:
    from lockstep.checkpoint.checkpointer import Checkpointer
    from lockstep.observe.hang.process import ProcessWatch
    from lockstep.observe.trackers.run import TrackerSet
    from lockstep.preparation.rollback import Rollback
    from lockstep.preparation.window import AccumulationState


class CheckpointMethods(AcceleratorParts):
    """Methods that need the prepared objects, and where the project is."""

    _watch: ProcessWatch
    _registered: list[object]
    _preemption_hook: Callable[[], str] | None = None
    _save_began = 0.0
    _has_saved_alone = False
    _log_with: object

    if TYPE_CHECKING:

        @property
        def _window(self) -> AccumulationState: ...
        @property
        def _trackers(self) -> TrackerSet: ...
        def end_training(self) -> None: ...

    def register_for_checkpointing(self, *objects: object) -> None:
        """Let ``save_state`` and ``load_state`` include these objects.

        Each of them needs the methods ``state_dict`` and ``load_state_dict``.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            class Seen:
                samples = 0
                def state_dict(self):
                    return {"samples": self.samples}
                def load_state_dict(self, state):
                    self.samples = state["samples"]

            accelerator, seen = Accelerator(), Seen()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            accelerator.register_for_checkpointing(seen)
            seen.samples = 64
            folder = accelerator.save_state("with_counter")
            seen.samples = 0
            accelerator.load_state(folder)
            assert seen.samples == 64
            ```
        """
        self._registered.extend(checked_stateful(objects))

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` in each ``save_state``, before anything is written.

        Args:
            hook: A function of the unwrapped models, their state dicts, and the directory.

        Returns:
            A handle whose ``remove()`` takes the hook away.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator, names = Accelerator(), []
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            handle = accelerator.register_save_state_pre_hook(lambda models, weights, folder: names.extend(weights[0]))
            accelerator.save_state("hooked")
            assert sorted(names) == ["bias", "weight"]
            handle.remove()
            ```
        """
        hooks = self._checkpointer.hooks
        return hooks.add(hooks.save, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` in each ``load_state``, before anything is loaded.

        Args:
            hook: A function of the unwrapped models and the directory.

        Returns:
            A handle whose ``remove()`` takes the hook away.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator, loaded = Accelerator(), []
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            handle = accelerator.register_load_state_pre_hook(lambda models, folder: loaded.append(str(folder)))
            folder = accelerator.save_state("to_be_loaded")
            accelerator.load_state(folder)
            assert len(loaded) == 1
            handle.remove()  # from now on it is not called
            ```
        """
        hooks = self._checkpointer.hooks
        return hooks.add(hooks.load, hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        in_memory: bool = False,
        **save_model_func_kwargs: object,
    ) -> str:
        """Write a checkpoint, and return its directory. Call it on every rank.

        Scripts written for Accelerate call it under ``if accelerator.is_main_process:``. Where each rank has the whole
        model, rank 0 then saves alone, without the random numbers of other ranks. Otherwise ``prepare`` refuses the
        script.

        A checkpoint has the state of the models, optimizers, schedulers, loss scale, loaders, random number
        generators and registered objects. The directory, or URL, appears only when the checkpoint is complete.

        Args:
            output_dir: The directory or URL. None: the next ``checkpoints/checkpoint_<i>`` of the project.
            safe_serialization: False is refused: a checkpoint has no pickle. ``save_model`` takes it.
            blocking: False: return at once. The state of this moment is copied and written while training goes on.
            in_memory: True: keep the checkpoint in the memory of the machines, each with a copy of another one's part,
                as long as the launch lasts. ``load_state()`` finds it if it is the newest.
            save_model_func_kwargs: Refused: options of Accelerate that mean nothing here.

        Raises:
            CheckpointError: this save failed, or the one before it in the background. Earlier checkpoints are intact.
            UsageError: no directory is known, the directory has files that are no checkpoint, or an option is
                refused.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            folder = accelerator.save_state("checkpoint")
            accelerator.load_state(folder)
            ```
        """
        from lockstep.checkpoint.save import save_checkpoint

        def contents() -> CheckpointContents:
            refuse_options("save_state", save_model_func_kwargs)
            if not safe_serialization:
                raise UsageError(
                    "save_state got safe_serialization=False, but a checkpoint has no pickle. Leave it out, and call "
                    "save_model(model, folder, safe_serialization=False) for pytorch_model.bin."
                )
            return self._contents()

        checkpointer = self._checkpointer
        if self.runtime.world_size > 1 and (line := one_rank_line()):
            checkpointer = self._alone(line, output_dir is None or not blocking or in_memory)
        self._save_began = time.perf_counter()
        if self._preparation.spikes is not None and not in_memory:  # which goes back to those on disk
            self._preparation.spikes.save_begins()
        part = self._step.clock.enter("save")
        try:
            return save_checkpoint(checkpointer, output_dir, contents, self._settings(), blocking, in_memory)
        finally:
            self._step.clock.enter(part)

    def _alone(self, line: str, needs_others: bool) -> Checkpointer:
        """Return what saves on rank 0 alone, where the script calls ``save_state`` there only."""
        parallel = self._options.parallel
        if parallel.shards or parallel.divides_weights or parallel.splits_model or needs_others:
            raise UsageError(
                f"{line} calls save_state on one rank only, but with parallel={str(parallel)!r}, without a directory, "
                "in the background or in memory all ranks save together. Call it on every rank, outside of the if."
            )
        if not self._has_saved_alone:
            warnings.warn(
                f"{line} calls save_state on one rank only, so checkpoints lack the random number generators of the "
                "other ranks. Call it on every rank to keep them.",
                stacklevel=3,
            )
        self._has_saved_alone = True
        return self._checkpointer.alone()

    def _committed(self, path: str, in_memory: bool) -> None:
        """Report a complete checkpoint to rank 0, by the thread that wrote it."""
        self._watch.committed(path)
        if self._preparation.spikes is not None and not in_memory:
            self._preparation.spikes.saved(path)
        self.measures.saved(path, time.perf_counter() - self._save_began)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, object] | None = None,
        **load_model_func_kwargs: object,
    ) -> str:
        """Load a checkpoint that ``save_state`` wrote, and return its directory. Call it on every rank.

        Args:
            input_dir: The directory or URL. None: the newest undamaged checkpoint of the project.
            load_kwargs: ``map_location`` is accepted and has no effect. Other options of Accelerate are refused.
            load_model_func_kwargs: The same as ``load_kwargs``.

        Raises:
            NoCheckpointError: there is no checkpoint.
            CheckpointError: every checkpoint is damaged, or it does not fit this run. Nothing was changed.
            UsageError: an option is refused.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator, ProjectConfiguration

            project = ProjectConfiguration("run", automatic_checkpoint_naming=True)
            accelerator = Accelerator(project_config=project)
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            accelerator.save_state()  # run/checkpoints/checkpoint_0
            accelerator.load_state()  # the newest one
            ```
        """
        from lockstep.checkpoint.load import load_checkpoint

        def contents() -> CheckpointContents:
            options = {**(load_kwargs or {}), **load_model_func_kwargs}
            refuse_options("load_state", options, known={"map_location"})
            return self._contents()

        began = time.perf_counter()
        path = load_checkpoint(self._checkpointer, input_dir, contents)
        if self._preparation.spikes is not None and not self._checkpointer.is_in_memory(path):
            self._preparation.spikes.loaded(path)
        self.measures.loaded(path, self._window.loaded_steps, time.perf_counter() - began)
        if self._log_with is not None:
            self._trackers.loaded()
        for observer in RunObserver.registered:
            observer.checkpoint_loaded(path)
        return path

    def _goes_back(self) -> Rollback:
        """Return what takes the run back where its policy for spikes says so."""
        from lockstep.preparation.rollback import Rollback  # few runs need it

        def loaded(path: str, seconds: float) -> None:
            self.measures.gone_back(path, self._window.loaded_steps, seconds)

        return Rollback(self._step, lambda: self._checkpointer, self._contents, loaded)

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        from lockstep.checkpoint.checkpointer import Checkpointer  # with pydantic, which a run may never need

        return Checkpointer(
            self.runtime, self._communicator, self._options.project, self._committed, self._step
        )

    def _settings(self) -> dict[str, object]:
        """Return how the run is set up, as checkpoints tell it."""
        return {
            "parallel": str(self._options.parallel),
            "mixed_precision": str(self._options.mixed_precision),
            "gradient_accumulation_steps": self._step.accumulation_steps,
            "split_batches": self._options.loaders.split_batches,
            "step": self.measures.step,
            "epoch": self.measures.epoch,
        }

    def wait_for_checkpoint(self) -> None:
        """Wait until a ``save_state(blocking=False)`` is complete. If it failed, every rank raises CheckpointError.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            folder = accelerator.save_state("in_background", blocking=False)
            model(torch.randn(8, 4))  # the loop goes on meanwhile
            accelerator.wait_for_checkpoint()  # now it is complete
            accelerator.load_state(folder)
            ```
        """
        self._checkpointer.wait()

    def _contents(self) -> CheckpointContents:
        return self._preparation.contents({"object": self._registered, "window": [self._window]})

    def register_preemption_hook(self, hook: Callable[[], str]) -> None:
        """Call ``hook()`` in place of ``save_state()`` when a signal asks the run to stop, or a user asks for a save.

        The hook runs on every rank at the same step boundary. It saves what the script needs to go on, and returns the
        path. Training may go on after it.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))

            def save() -> str:
                return str(accelerator.save_state("before_the_stop"))

            accelerator.register_preemption_hook(save)
            ```
        """
        self._preemption_hook = hook

    def check_preemption(self) -> None:
        """Tell Lockstep that a step is complete. Only a loop that reads from no prepared loader needs it.

        Call it on every rank. SIGTERM, SIGUSR1 or SIGUSR2, to the launcher or to any rank, asks the run to stop. All
        ranks then save at the same call, and the processes end with exit code 75. Prepared loaders do this by
        themselves, when the loop asks for a batch after an optimizer step.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in torch.randn(3, 8, 4):  # not a prepared loader
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                accelerator.check_preemption()  # after a signal: saves, and ends with code 75
            ```
        """
        self._step.clock.boundary()

    def _save_and_end(self) -> str | None:
        """Save where the next ``load_state`` will look, and end training; None where there is no such place."""
        if self._preemption_hook is not None:
            place: str | None = self._preemption_hook()
        elif self._options.project.automatic_checkpoint_naming:
            place = self.save_state()
        else:
            place = None
        self.end_training()
        return place
