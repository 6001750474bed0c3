"""Where a run stands: in which micro-batch of the step, and of which rank the batch is."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lockstep.data.loader import PreparedLoader
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.runtime.seed import set_seed


class BatchPosition:
    """Of a rank that trains on its own batches.

    A script may take several batches before it trains on the first of them, as transformers' Trainer does. From then on
    it is the backwards that are counted, not the batches that loaders hand out.

    Args:
        rank: Its number among the ranks with batches of their own.
        models: The prepared ones: a list that grows.
        seed: Of the run. With each batch all generators are seeded, by it and by what batch it is, so that runs on
            other numbers of processes draw the same numbers for the same batch.

    Attributes:
        micro_batch: From 0 in each step.
        data_rank: Whose batch is being trained on.
        on_batch: Called with each batch to be trained on.
        draws: Whether random numbers were drawn between a batch and its backward.
    """

    has_all_ranks = False
    """Whether this process trains on the batches of all ranks."""

    def __init__(self, rank: int = 0, models: Sequence[ParallelModel] = (), seed: int = 0) -> None:
        self.data_rank = rank
        self.micro_batch = 0
        self.on_batch: Callable[[object], None] = lambda batch: None
        self.draws = False
        self._models = models
        self._seed = seed
        self._handed = 0
        self._trained = 0
        self._all_handed = 0
        self._all_trained = 0
        self._awaits_backward = False
        self._is_ahead = False
        self._begun = -1
        self._seeded = _generators()

    def prepared(self) -> None:
        """Note that an object was prepared, so that later random numbers do not depend on what that has drawn."""
        if not self._all_handed:
            self._seed_for(0, -2)

    def watch(self, loader: PreparedLoader) -> None:
        """Count the batches of a loader."""
        loader.around = self._batches_of

    # What the run tells -----------------------------------------------------------------------------------

    def forward_begins(self, model: ParallelModel) -> None:
        """Note that a prepared ``model`` is called, to be trained."""
        # Two batches were handed out and none has had its backward: the script reads ahead of its training.
        if self._awaits_backward and self._handed - self._trained > 1:
            self._is_ahead = True
        # Then generators are seeded at a batch's first forward: it was handed out before another's backward.
        if self._is_ahead and self._begun != self._all_trained:
            self._begun = self._all_trained
            self._begin_batch(self._trained, self._all_trained)

    def backward_begins(self) -> None:
        """Gradients come."""
        self.draws = self.draws or not torch.equal(_generators(), self._seeded)
        if self._awaits_backward or self._is_ahead:
            self._awaits_backward = False
            self._trained += 1
            self._all_trained += 1

    def stepped(self) -> None:
        """Note that an optimizer has made a step: the next batch is the first of another."""
        # What was read ahead belongs to the next step.
        self._handed = self._handed - self._trained if self._is_ahead else 0
        self._trained = 0

    def clears(self) -> bool:
        """Return whether gradients are cleared now that a script asks for it."""
        return True

    @property
    def share(self) -> float:
        """Of the gradients of one batch in those of the step, where no ``Accelerator`` has divided them."""
        return 1.0

    @property
    def divided(self) -> int:
        """By what the script divides losses because this process has the batches of so many ranks."""
        return 1

    # Batches ----------------------------------------------------------------------------------------------

    def _batches_of(self, loader: PreparedLoader, batches: Iterator[object]) -> Iterator[object]:
        return self.batches(batches)

    def batches(self, batches: Iterator[object]) -> Iterator[object]:
        """Return the batches of a loader, counted."""
        self._handed = self._trained
        for batch in batches:
            if self._is_trained_on():
                self._hand_out(batch)
            yield batch
        # An epoch may be drawn next, which all ranks draw alike.
        self._seed_for(self._all_handed, -1)

    def _is_trained_on(self) -> bool:
        """Return whether batches that come now are for training, as far as models and torch say."""
        return torch.is_grad_enabled() and (
            not self._models or any(model.module.training for model in self._models)
        )

    def _hand_out(self, batch: object) -> None:
        self._begin_batch(self._handed, self._all_handed)
        self._handed += 1
        self._all_handed += 1
        self._awaits_backward = True
        self.on_batch(batch)

    def _begin_batch(self, number: int, of_all: int) -> None:
        """Batch ``number`` of the step comes, ``of_all`` in the run."""
        self.micro_batch = number
        self._seed_for(of_all, self.data_rank)

    def _seed_for(self, number: int, rank: int) -> None:
        # Unlike hash() of a string, the same in every process.
        set_seed(zlib.crc32(f"{self._seed} {number} {rank}".encode()))
        self._seeded = _generators()


def _generators() -> Tensor:
    """Return the states of torch's generators."""
    return torch.cat([torch.get_rng_state(), *torch.cuda.get_rng_state_all()])
