"""Training with gradients that come late, but never later than a bound."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.model.changes import attributes_set
from lockstep.parallel.asynchronous.block import Trainer, TrainingBlock
from lockstep.parallel.asynchronous.rounds import MessageFormat, MessageWord, Rounds, Total
from lockstep.runtime.failure import is_consequence
from lockstep.torch_internals import optim as torch_optim


@dataclass(frozen=True)
class StalenessReport:
    """How stale the gradients of all ranks were when they were applied. Each gradient counts once.

    The staleness of a gradient is the number of updates between the parameters that it was computed on and those
    that it was applied to.

    Args:
        bound: The highest staleness that is allowed.
        histogram: The number of gradients of each staleness.
        waits: How often this rank had to wait for an update, because it would have run too far ahead.
        bytes_sent: The bytes that this rank has sent.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, BoundedStaleness

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with BoundedStaleness(accelerator, model, optimizer, staleness=2) as stale:
            accelerator.backward(model(torch.randn(8, 4)).square().mean())
            stale.step()
        accelerator.print(stale.report)
        assert stale.report.maximum <= stale.report.bound == 2
        ```
    """

    bound: int
    histogram: Mapping[int, int]
    waits: int
    bytes_sent: int

    @property
    def gradients(self) -> int:
        """The number of gradients that were applied, from all ranks."""
        return sum(self.histogram.values())

    @property
    def maximum(self) -> int:
        """The highest staleness of a gradient, in updates."""
        return max(self.histogram, default=0)

    @property
    def mean(self) -> float:
        """The mean staleness of the gradients, in updates."""
        return sum(stale * count for stale, count in self.histogram.items()) / max(1, self.gradients)

    def __str__(self) -> str:
        shares = ", ".join(
            f"{stale}: {count / self.gradients:.0%}" for stale, count in sorted(self.histogram.items())
        )
        return (
            f"{self.gradients} gradients, staleness at most {self.maximum} (bound {self.bound}), mean {self.mean:.2f}"
            f"{f' ({shares})' if shares else ''}; {self.waits} waits"
        )


SCHEDULED = frozenset({"lr", "momentum", "betas", "weight_decay"})
"""What schedules change in an optimizer's groups. An update is applied with the values of its own step."""

FAILURE_NOTICE_S = 5.0
"""How long a rank that failed waits for the others to hear of it."""


class BoundedStaleness(TrainingBlock):
    """Trains without waiting for other ranks' gradients: they may arrive late, but at most by ``staleness`` steps.

    Update t is one step of the optimizer with the mean of all ranks' gradients of their step t. Ranks take turns as
    the server that adds these up: rank t mod N. Each rank applies the same updates in the same order, as soon as they
    arrive. A rank waits only if its next gradient would be computed on parameters that lack more than ``staleness``
    of the updates before it. So a rank is never more than ``staleness`` steps ahead of the slowest one. Every
    gradient is applied exactly once, and at the end all ranks have the same parameters and the same optimizer state.

    References: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013;
    Lian et al., Asynchronous Parallel Stochastic Gradient for Nonconvex Optimization, NIPS 2015.

    Args:
        accelerator: The ``Accelerator`` that has prepared the model.
        model: The model that ``prepare`` returned. Each rank has the whole model, and all ranks make the same number
            of steps.
        optimizer: The optimizer that ``prepare`` returned. All its parameters belong to ``model``.
        staleness: The bound, in optimizer steps. 0 is synchronous training.
        max_norm: Clip the mean gradient of each update to this 2-norm. None: it is not clipped.
            ``accelerator.clip_grad_norm_`` clips what each rank sends instead.
        enabled: False: gradients are averaged at each step, and ``step`` is ``optimizer.step``.

    Raises:
        ConfigError: ``staleness`` is negative, or ``max_norm`` is not above 0. All ranks raise it.
        UsageError: the model is sharded, split or not prepared, the optimizer trains another model, or the precision
            is fp16, whose loss scale would be that of another step. All ranks raise it.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, BoundedStaleness

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with BoundedStaleness(accelerator, model, optimizer, staleness=2) as stale:
            for batch in torch.randn(10, 8, 4):
                accelerator.backward(model(batch).square().mean())
                stale.step()  # in place of optimizer.step()
                optimizer.zero_grad()
            stale.synchronize()  # all ranks are equal here
        stale.finish()  # the end of the block did it
        assert stale.report.maximum <= 2
        ```
    """

    def __init__(
        self,
        accelerator: Trainer,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        staleness: int,
        *,
        max_norm: float | None = None,
        enabled: bool = True,
    ) -> None:
        self.staleness = staleness
        self._optimizer = optimizer
        self._max_norm = max_norm
        super().__init__(accelerator, model, f"{staleness}, {max_norm}", enabled)
        self.enabled = enabled and accelerator.runtime.world_size > 1
        self.recent: deque[list[int]] = deque(maxlen=1024)
        self._parameters = [p for p in nn.Module.parameters(model) if p.requires_grad]
        # Of steps whose updates have not come.
        self._settings: deque[list[dict[str, object]]] = deque()
        # staleness -> gradients that were applied
        self._histogram: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._steps = self._updates = self._computed_on = 0
        self._rounds: Rounds | None = None

    def _check(self) -> None:
        self._check_count("staleness", self.staleness, least=0)
        if self._max_norm is not None and not self._max_norm > 0:
            raise ConfigError(
                f"BoundedStaleness got max_norm={self._max_norm}, but it must be above 0, or None. Pass one of "
                "these."
            )
        super()._check()
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"BoundedStaleness got a {type(self._optimizer).__name__} as optimizer. Pass what prepare() returned."
            )
        own = {id(parameter) for parameter in nn.Module.parameters(self.model)}
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        foreign = sum(id(parameter) not in own for parameter in trained)
        if foreign:
            raise UsageError(
                f"The optimizer trains {foreign} parameters of another model than BoundedStaleness got, so their "
                "gradients would not be averaged. Pass one module that holds both models."
            )
        if self._trainer.mixed_precision == "fp16":
            raise UsageError(
                "BoundedStaleness got mixed_precision='fp16', but a late gradient has the loss scale of another "
                "step. Use 'bf16' or 'no'."
            )

    @property
    def report(self) -> StalenessReport:
        """The staleness of all gradients, from all ranks, that this rank has applied so far."""
        counts, histogram = self._counts, dict(sorted(self._histogram.items()))
        return StalenessReport(
            self.staleness, histogram, counts["waits"], counts["sent"] + counts["answered"]
        )

    @property
    def updates_missing(self) -> int:
        """The number of this rank's steps whose updates it has not applied yet."""
        return self._steps - self._updates

    def step(self) -> None:
        """Send the gradients of this step, and apply the updates that have arrived. Call it in place of
        ``optimizer.step()``.

        Before the last micro-batch of an accumulation window, it does nothing.

        Raises:
            LockstepError: another rank failed.
            UsageError: it is called outside of the block, another rank has ended before, or a parameter got a
                gradient that required none when this object was made.
        """
        if not self._trainer.sync_gradients:
            return
        if not self.enabled:
            self._update()
            return
        rounds = self._open_rounds()
        self._check_gradients()
        gradients = [parameter.grad for parameter in self._parameters]
        rounds.post(self._form.pack(MessageWord.RUNNING, gradients, self._steps - self._computed_on))
        groups = self._optimizer.param_groups
        self._settings.append(
            [{key: deepcopy(group[key]) for key in SCHEDULED & group.keys()} for group in groups]
        )
        self._steps += 1
        # Schedulers warn if they advance before their optimizer has, which is late here.
        torch_optim.note_step(getattr(self._optimizer, "optimizer", self._optimizer))
        # At most ``staleness`` updates may be missing from the parameters of the next gradient.
        self._apply(rounds, at_least=self._steps - self.staleness)

    def synchronize(self) -> None:
        """Apply the updates of all steps until now. Afterwards all ranks have the same parameters.

        Call it after the same number of steps on all ranks, before you save or validate.

        Raises:
            LockstepError: another rank failed.
            UsageError: another rank has ended before.
        """
        if self.enabled and self.updates_missing:
            self._apply(self._open_rounds(), at_least=self._steps)

    def finish(self) -> None:
        """Apply all updates, and average floating-point buffers. The end of the block calls it, on all ranks.

        Raises:
            LockstepError: another rank failed.
            UsageError: the ranks made different numbers of steps.
        """
        rounds = self._rounds
        if rounds is None:
            return
        rounds.post(self._form.pack(MessageWord.ENDED))
        self._apply(rounds, at_least=self._steps)
        # The round in which ranks say that they have ended carries no update.
        last = rounds.take(wait=True)
        assert last is not None
        self._check_words(rounds, last, self._steps)
        self._rounds = None
        rounds.close()
        self._average(self._floating_buffers())

    # Applying updates -------------------------------------------------------------------------------

    def _apply(self, rounds: Rounds, at_least: int) -> None:
        """Apply what has come, and wait until ``at_least`` so many updates are applied."""
        while self._updates < self._steps:
            total = rounds.take(wait=self._updates < at_least)
            if total is None:
                break
            ages = total.staleness
            self._check_words(rounds, total, self._updates)
            assert max(ages) <= self.staleness, f"staleness {ages} is above the bound {self.staleness}"
            self._apply_late(self._form.means(total), self._settings.popleft())
            self._updates += 1
            self._histogram.update(ages)
            self.recent.append(ages)
        # Otherwise the open window was begun on the parameters of before.
        if self._trainer.sync_gradients:
            self._computed_on = self._updates

    def _apply_late(self, gradients: list[torch.Tensor | None], settings: list[dict[str, object]]) -> None:
        """Step with the gradients and settings of an earlier step, and put back those of the window that is open."""
        # An accumulation window may be open: its gradients, and the learning rate of now, come back afterwards.
        own = [parameter.grad for parameter in self._parameters]
        groups = zip(self._optimizer.param_groups, settings, strict=True)
        present = [{key: group[key] for key in values} for group, values in groups]
        # Otherwise the prepared optimizer would not step.
        with attributes_set(self._trainer, sync_gradients=True):
            try:
                self._set_gradients(gradients, settings)
                self._update()
            finally:
                self._set_gradients(own, present)

    def _set_gradients(self, gradients: list[torch.Tensor | None], settings: list[dict[str, object]]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(values)

    def _update(self) -> None:
        if self._max_norm is not None:
            clip_grad_norm_(self._parameters, self._max_norm)
        self._optimizer.step()

    # Entering and leaving ---------------------------------------------------------------------------

    def _begin(self) -> None:
        runtime = self._trainer.runtime
        self._form = MessageFormat(self._parameters, runtime)
        self._steps = self._updates = self._computed_on = 0
        self._settings.clear()
        self._rounds = Rounds(runtime, self._form, self._counts)

    def _end(self) -> None:
        self.finish()

    def _open_rounds(self) -> Rounds:
        if self._rounds is None:
            raise UsageError(
                "BoundedStaleness was used outside of its block. Train inside 'with BoundedStaleness(...)'."
            )
        return self._rounds

    def _check_gradients(self) -> None:
        known = set(map(id, self._parameters))
        late = [n for n, p in self.model.named_parameters() if p.grad is not None and id(p) not in known]
        if late:
            raise UsageError(
                f"'{late[0]}' and {len(late) - 1} other parameters got gradients, but required none when "
                "BoundedStaleness was made. Make BoundedStaleness after the last change of requires_grad."
            )

    def _check_words(self, rounds: Rounds, total: Total, round_number: int) -> None:
        """Raise on all ranks, in the same round, if some rank goes no further."""
        words = total.words
        if set(words) in ({MessageWord.ENDED}, {MessageWord.RUNNING}):
            return
        self._rounds = None
        rounds.close()
        if MessageWord.FAILED in words:
            raise LockstepError(
                f"Rank {words.index(MessageWord.FAILED)} left BoundedStaleness with an exception after {round_number} "
                "steps. This rank stops with it. Mend the cause on that rank."
            )
        ended, running = words.index(MessageWord.ENDED), words.index(MessageWord.RUNNING)
        raise UsageError(
            f"Rank {ended} ended after {round_number} steps, but rank {running} made more. Let every rank make the "
            "same number of steps: prepare the loader with even_batches=True."
        )

    def _report_failure(self, error: BaseException) -> None:
        """Say it in the next round."""
        rounds, self._rounds = self._rounds, None
        # The others know already.
        if rounds is None:
            return
        # The error that counts is the one on its way.
        with suppress(Exception):
            # Of another rank's failure all others have heard.
            if not is_consequence(error):
                rounds.post(self._form.pack(MessageWord.FAILED))
            rounds.close(FAILURE_NOTICE_S if isinstance(error, Exception) else 0)
