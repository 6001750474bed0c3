"""Training with gradients that come late, but never later than a bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.parallel.asynchronous.averaging import average, floating_buffers
from lockstep.parallel.asynchronous.block import Trainer, TrainingBlock, check_count, check_replicas, meet
from lockstep.parallel.asynchronous.late_step import (
    mark_as_stepped,
    settings_of,
    with_gradients,
    with_settings,
)
from lockstep.parallel.asynchronous.report import StalenessCounter, StalenessReport
from lockstep.parallel.asynchronous.rounds import MessageFormat, MessageWord, Rounds, Total, message_device
from lockstep.runtime.failure import is_consequence

FAREWELL_S = 5.0
"""How long a rank that failed waits for the others to hear of it."""


class BoundedStaleness(TrainingBlock):
    """Go on with the next batch while gradients travel; wait only to keep them from being too stale.

        with BoundedStaleness(accelerator, model, optimizer, staleness=2) as stale:
            for batch in loader:
                loss = ...
                accelerator.backward(loss)
                stale.step()                # in place of optimizer.step()
                optimizer.zero_grad()
        print(stale.report)

    Update t is one step of the optimizer with the mean of all ranks' gradients of their step t. Ranks take turns as the
    server that adds these up: rank t mod N. Each rank applies the same updates in the same order, as soon as they
    arrive. It waits only where its next gradient would be computed on parameters that lack more than ``staleness`` of
    the updates before it. So a rank is never more than ``staleness`` steps ahead of the slowest; every gradient is
    applied exactly once; and at the end all ranks have the same parameters and the same optimizer state. With
    ``staleness=0`` it is synchronous training.

    References: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013;
    Lian et al., Asynchronous Parallel Stochastic Gradient for Nonconvex Optimization, NIPS 2015.

    Args:
        model: What ``prepare`` returned, replicated on every rank. All ranks must make the same number of steps.
        optimizer: What ``prepare`` returned; all that it trains belongs to ``model``.
        staleness: The bound.
        max_norm: Clip the mean gradient of each update to this 2-norm. ``accelerator.clip_grad_norm_`` clips what
            each rank sends instead.
        enabled: False: gradients are averaged at each step, and ``step`` is ``optimizer.step``.

    Raises:
        ConfigError: ``staleness`` is negative, or ``max_norm`` not above 0.
        UsageError: the model is sharded, split, or not prepared; the optimizer trains another model; or fp16, whose
            loss scale would have to be that of another step. All are raised on all ranks.
    """

    def __init__(
        self,
        accelerator: Trainer,
        model: nn.Module,
        optimizer: Any,
        staleness: int,
        *,
        max_norm: float | None = None,
        enabled: bool = True,
    ) -> None:
        super().__init__()
        self._trainer = accelerator
        self._communicator = Communicator(accelerator.runtime)
        with raise_on_all_ranks(self._communicator):
            check_count("BoundedStaleness", "staleness", staleness, least=0)
            if max_norm is not None and not max_norm > 0:
                raise ConfigError(
                    f"BoundedStaleness got max_norm={max_norm}, but a norm to clip at is above 0. Set one, or None."
                )
            check_replicas("BoundedStaleness", accelerator, model)
            _check_optimizer(optimizer, model)
            if accelerator.mixed_precision == "fp16":
                raise UsageError(
                    "BoundedStaleness got mixed_precision='fp16', but a gradient that comes late has the loss scale of "
                    "another step. Use 'bf16' or 'no'."
                )
        meet(self._communicator, f"BoundedStaleness({staleness}, {max_norm}, enabled={enabled})", 0)
        self.model = model
        self.staleness = staleness
        self.enabled = enabled and accelerator.runtime.world_size > 1
        self.recent: deque[list[int]] = deque(maxlen=1024)
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._known = {id(parameter) for parameter in self._parameters}
        self._settings: deque[list[dict[str, Any]]] = deque()  # of steps whose updates have not come
        self._counter = StalenessCounter(staleness)
        self._steps = self._updates = self._computed_on = 0
        self._waits = self._bytes_sent = 0
        self._rounds: Rounds | None = None

    @property
    def report(self) -> StalenessReport:
        """How stale the gradients were that this rank has applied so far, those of all ranks."""
        rounds = self._rounds
        waits, sent = (0, 0) if rounds is None else (rounds.waits, rounds.bytes_sent)
        return self._counter.report(self._waits + waits, self._bytes_sent + sent)

    @property
    def updates_missing(self) -> int:
        """Steps that this rank has made and whose updates it has not applied yet."""
        return self._steps - self._updates

    def _begin(self, exits: ExitStack) -> None:
        if not self.enabled:
            return
        runtime = self._trainer.runtime
        device = message_device(runtime.device)
        self._form = MessageFormat(self._parameters, runtime.rank, runtime.world_size, device)
        self._steps = self._updates = self._computed_on = 0
        self._settings.clear()
        exits.enter_context(self._trainer.alone(self.model))
        self._rounds = Rounds(runtime, self._form)

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self.finish()
        else:
            self._report_failure(error)

    def step(self) -> None:
        """Send this step's gradients and apply the updates that have come; inside an accumulation window do nothing.

        Raises:
            LockstepError: another rank failed.
            UsageError: it is called outside of the block, or another rank has ended before.
        """
        if not self._trainer.sync_gradients:
            return
        if not self.enabled:
            self._update()
            return
        rounds = self._open_rounds()
        self._check_gradients()
        gradients = [parameter.grad for parameter in self._parameters]
        rounds.post(self._form.pack(gradients, MessageWord.RUNNING, self._steps - self._computed_on))
        self._settings.append(settings_of(self._optimizer))
        self._steps += 1
        mark_as_stepped(self._optimizer)
        self._apply(rounds, at_least=self._steps - self.staleness)

    def synchronize(self) -> None:
        """Apply the updates of all steps made so far: after the same number of steps all ranks are equal then.

        Call it on all ranks, before parameters are saved or validated.
        """
        if self.enabled and self.updates_missing:
            self._apply(self._open_rounds(), at_least=self._steps)

    def finish(self) -> None:
        """Apply all updates, and average floating-point buffers. The end of the block calls it. Collective."""
        rounds = self._rounds
        if rounds is None:
            return
        rounds.post(self._form.nothing(MessageWord.ENDED))
        self._apply(rounds, at_least=self._steps)
        last = rounds.take(wait=True)
        assert last is not None
        self._check_words(last, self._steps)
        self._leave(rounds)
        average(self._communicator, floating_buffers(self.model))

    # Applying updates -------------------------------------------------------------------------------

    def _apply(self, rounds: Rounds, at_least: int) -> None:
        """Apply what has come, and wait until ``at_least`` so many updates are applied."""
        while self._updates < self._steps:
            total = rounds.take(wait=self._updates < at_least)
            if total is None:
                break
            self._check_words(total, self._updates)
            with with_gradients(self._parameters, self._form.means(total)):
                with with_settings(self._optimizer, self._settings.popleft()), self._real_step():
                    self._update()
            self._updates += 1
            self._counter.add(total.staleness)
            self.recent.append(total.staleness)
        if self._trainer.sync_gradients:  # else the open window was begun on the parameters of before
            self._computed_on = self._updates

    def _update(self) -> None:
        if self._max_norm is not None:
            clip_grad_norm_(self._parameters, self._max_norm)
        self._optimizer.step()

    @contextmanager
    def _real_step(self) -> Iterator[None]:
        """Let the prepared optimizer step, although a window may be open when an update is applied."""
        before = self._trainer.sync_gradients
        self._trainer.sync_gradients = True
        try:
            yield
        finally:
            self._trainer.sync_gradients = before

    # Leaving ----------------------------------------------------------------------------------------

    def _open_rounds(self) -> Rounds:
        if self._rounds is None:
            raise UsageError(
                "BoundedStaleness was used outside of its block. Train inside 'with BoundedStaleness(...)'."
            )
        return self._rounds

    def _check_gradients(self) -> None:
        known = self._known
        late = [n for n, p in self.model.named_parameters() if p.grad is not None and id(p) not in known]
        if late:
            raise UsageError(
                f"'{late[0]}' and {len(late) - 1} other parameters got gradients, but required none when "
                "BoundedStaleness was made. Make it after the last change of requires_grad."
            )

    def _check_words(self, total: Total, round_number: int) -> None:
        """Raise on all ranks, in the same round, if some rank goes no further."""
        rounds = self._open_rounds()
        words = total.words
        if all(word is MessageWord.ENDED for word in words) or all(
            word is MessageWord.RUNNING for word in words
        ):
            return
        self._leave(rounds)
        if MessageWord.FAILED in words:
            raise LockstepError(
                f"Rank {words.index(MessageWord.FAILED)} left BoundedStaleness with an exception after "
                f"{round_number} steps. "
                "This rank stops with it. Mend the cause on that rank."
            )
        ended, running = words.index(MessageWord.ENDED), words.index(MessageWord.RUNNING)
        raise UsageError(
            f"Rank {ended} ended after {round_number} steps, but rank {running} "
            "made more. Let every rank make the same number of steps: prepare the loader with even_batches=True."
        )

    def _leave(self, rounds: Rounds, limit_s: float | None = None) -> None:
        self._rounds = None
        self._waits += rounds.waits
        rounds.close(limit_s)
        self._bytes_sent += rounds.bytes_sent

    def _report_failure(self, error: BaseException) -> None:
        """Let the others know in the next round, instead of leaving them waiting for this rank."""
        if self._rounds is None:  # they know
            return
        rounds = self._rounds
        with suppress(Exception):  # the error that counts is the one on its way
            if not is_consequence(error):
                rounds.post(self._form.nothing(MessageWord.FAILED))
            self._leave(rounds, FAREWELL_S if isinstance(error, Exception) else 0)
        self._rounds = None


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"BoundedStaleness got a {type(optimizer).__name__} as optimizer. Pass what prepare() returned."
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    foreign = sum(id(parameter) not in own for parameter in held)
    if foreign:
        raise UsageError(
            f"The optimizer trains {foreign} parameters of another model than BoundedStaleness got, whose gradients "
            "would not be averaged. Pass one module that holds both."
        )
