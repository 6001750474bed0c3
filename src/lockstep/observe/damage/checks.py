"""The checks of one ``Accelerator``: what its optimizers ask before a step, and tell after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm.collectives import Communicator
from lockstep.config.handlers import DamageChecks
from lockstep.errors import DamageError
from lockstep.observe.damage.divergence import Divergence
from lockstep.observe.damage.gradients import GradientTrace, any_not_finite, explain
from lockstep.parallel.parallel_model import ParallelModel

logger = logging.getLogger("lockstep.damage")


class DamageWatch:
    """Looks for replicas that differ, every so many steps, and for gradients that are not finite, before each.

    Args:
        models: All prepared models; the list may grow.
        ranks_step_together: Whether all ranks make this step with averaged gradients. Where they do not, as inside
            ``LocalSGD`` or on uneven inputs, replicas may differ, and each rank judges its own gradients.
        tell: Called with a sentence about the damage that was found.
    """

    def __init__(
        self,
        options: DamageChecks,
        communicator: Communicator,
        models: Sequence[ParallelModel],
        ranks_step_together: Callable[[], bool],
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._options = options
        self._communicator = communicator
        self._models = models
        self._together = ranks_step_together
        self._tell = tell
        self._divergence = Divergence(communicator)
        self._trace = GradientTrace()
        self._steps: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._skips: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._checked = 0

    @property
    def reads_gradients(self) -> bool:
        return self._options.bad_gradients != "ignore"

    def add(self, optimizer: Optimizer) -> None:
        self._steps[optimizer] = self._skips[optimizer] = 0

    def clear(self) -> None:
        self._trace.clear()

    def backward(self, loss: torch.Tensor) -> AbstractContextManager[None]:
        """Surround ``loss.backward()``; ``loss`` is 0-d."""
        return self._trace.backward(loss, self._models) if self.reads_gradients else nullcontext()

    def may_step(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients are finite on all ranks; False: skip this step. Collective.

        Raises:
            DamageError: they are not, and training is to stop, or too many steps were skipped in a row.
        """
        if not self.reads_gradients:
            return True
        together = self._together()
        if not any_not_finite(optimizer, self._communicator if together else None):
            self._skips[optimizer] = 0
            return True
        self._refuse(optimizer, together)
        return False

    def skipped(self, optimizer: Optimizer) -> None:
        """Note that a step was left out."""
        self._steps[optimizer] += 1
        self._trace.clear()

    def stepped(self, optimizer: Optimizer, scale: float | None = None) -> None:
        """Note that a step was made, or left out by the loss scaler. Collective every so many of them.

        ``scale``: that of the loss after the loss scaler skipped the step.

        Raises:
            DamageError: parameters differ among ranks; or as ``may_step``, at loss scales below 1, where it is not
                for the scale that gradients are infinite.
        """
        if scale is None:
            self._skips[optimizer] = 0
        elif scale < 1:
            self._refuse(optimizer, self._together())
        step = self._steps[optimizer] = self._steps[optimizer] + 1
        self._trace.clear()
        every = self._options.divergence_every
        # Optimizers that step in turn come to the same number: one check is for all of them.
        if every and step > self._checked and step % every == 0 and self._together():
            self._checked = step
            try:
                self._divergence.check(step, self._models)
            except DamageError as error:
                self._tell(str(error))
                raise

    def _refuse(self, optimizer: Optimizer, together: bool) -> None:
        rank = self._communicator.runtime.rank
        evidence = [self._trace.evidence(rank, self._models)]
        # All ranks come here, as any_not_finite has asked all of them.
        if together:
            evidence = self._communicator.gather_object(evidence)
        sentence = explain(self._steps[optimizer] + 1, self._trace.micro_steps, evidence)
        self._tell(sentence)
        if self._options.bad_gradients == "stop":
            raise DamageError(
                f"{sentence}. No rank made the step. Look at the batches of that rank and at what its model computes "
                "from them, or pass DamageChecks(bad_gradients='skip')."
            )
        self._skips[optimizer] += 1
        if self._skips[optimizer] > self._options.max_skips:
            raise DamageError(
                f"{sentence}, after {self._options.max_skips} steps in a row that were skipped for the same reason. "
                "Load the last checkpoint and lower the learning rate, or look at the data."
            )
        if rank == 0 or not together:
            logger.warning("%s. The step is skipped on all ranks.", sentence)
