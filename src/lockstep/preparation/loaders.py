"""What ``prepare`` does with data loaders."""

from __future__ import annotations

import weakref

from torch import nn
from torch.utils.data import DataLoader

from lockstep.comm.tree import StateDict
from lockstep.data.loader import PreparedLoader
from lockstep.data.prepare import prepare_loader
from lockstep.errors import CheckpointError, UsageError
from lockstep.observe.log import get_logger
from lockstep.observe.run_observer import RunObserver
from lockstep.preparation.checks import check_micro_batch
from lockstep.preparation.run_context import RunContext

logger = get_logger(__name__)


class LoaderPreparation:
    """Prepares the loaders of one ``Accelerator``, and is the owner of the list of them.

    Scripts may make loaders anew in each epoch, so those that they hold no longer are forgotten.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._prepared: list[weakref.ref[PreparedLoader]] = []
        # Loaded states, for loaders that are prepared after load_state.
        self._waiting: list[StateDict] = []
        # Those that give chunks of the sequence, by their ids. Kept, so that no other object gets such an id.
        self._in_chunks: dict[int, PreparedLoader] = {}

    @property
    def prepared(self) -> list[PreparedLoader]:
        """Those that the script holds, in the order in which they were prepared."""
        return [loader for one in self._prepared if (loader := one()) is not None]

    def keep_waiting(self, states: list[StateDict]) -> None:
        """Let loaders that are prepared from now on continue where these were: the first those within an epoch."""
        self._waiting = sorted(states, key=lambda state: not any(state["samples"]))

    def prepare(self, loader: DataLoader[object], device_placement: bool | None = None) -> PreparedLoader:
        if isinstance(loader, PreparedLoader) and any(loader is known for known in self.prepared):
            return loader
        if any(loader is known.original for known in self.prepared):
            raise UsageError(
                f"A {type(loader).__name__} was passed to prepare twice. Prepare each loader once and use what "
                "prepare returned."
            )
        run = self._run
        ranks = run.meshes.data_size if run.options.loaders.split_batches else 1
        check_micro_batch(loader, run.options.micro_batch_size, ranks)
        place = run.device_placement if device_placement is None else device_placement
        chosen = loader
        for observer in RunObserver.registered:
            chosen = observer.loader_comes(chosen)
        prepared = prepare_loader(
            chosen,
            runtime=run.runtime,
            step=run.step,
            config=run.options.loaders,
            communicator=run.communicator,
            device=run.runtime.device if place else None,
            rng_types=run.options.rng_types,
            axes=run.meshes.axes,
        )
        self._prepared = [weakref.ref(known) for known in (*self.prepared, prepared)]
        self._continue(prepared)
        for observer in RunObserver.registered:
            observer.loader_prepared(prepared)
        return prepared

    def _continue(self, prepared: PreparedLoader) -> None:
        """Give it the first of the waiting states that is one of its data."""
        for number, state in enumerate(self._waiting):
            try:
                prepared.load_state_dict(state)
            except CheckpointError:
                continue
            del self._waiting[number]
            return

    def warn_of_unused(self) -> None:
        """Warn, once, that a backward came before any batch of a prepared loader, if there are several ranks."""
        self._run.step.has_given_batches = True
        if (ranks := self._run.meshes.data_size) > 1:
            logger.warning(
                "backward was called on %d ranks, but no loader that prepare() returned has given a batch. If all "
                "ranks read the same rows, pass the DataLoader to accelerator.prepare(), which divides them.",
                ranks,
            )

    def shard_sequences(self, prepared: list[object]) -> None:
        """Shard the sequences of loaders that are prepared together with a model, as DeepSpeed does."""
        from lockstep.parallel.context.sharded_loader import shard_sequences

        models = [item for item in prepared if isinstance(item, nn.Module)]
        for loader in prepared if models else ():
            if isinstance(loader, PreparedLoader) and id(loader) not in self._in_chunks:
                self._in_chunks[id(loader)] = loader
                loader.around = shard_sequences(models, loader.around)

    def gives_chunks(self, loader: object) -> bool:
        """Return whether a loader gives chunks of the sequence."""
        return id(loader) in self._in_chunks

    def override_even_batches(self, even_batches: bool) -> None:
        """Set it on all loaders that can still be changed, and warn about the others."""
        for loader in self.prepared:
            try:
                loader.even_batches = even_batches
            except UsageError as error:
                logger.warning("%s", error)

    def clear(self) -> None:
        """Forget all loaders."""
        self._prepared.clear()
        self._waiting.clear()
        self._in_chunks.clear()
