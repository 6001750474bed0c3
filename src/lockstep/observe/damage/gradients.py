"""Which rank has which gradients that are not finite, and since which micro-step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import local
from lockstep.config.values import join_names
from lockstep.observe.damage.divergence import autograd_leaves, local_parameters, ranks_are
from lockstep.parallel.parallel_model import ParallelModel


class NonFinite(NamedTuple):
    """A tensor with a number that is none, in micro-step ``micro`` of a step, counted from 1."""

    micro: int
    name: str
    # NaN or Inf.
    kind: str


@dataclass(frozen=True)
class GradientEvidence:
    """Of one rank: losses and gradients that it computed itself, and gradients after they were averaged."""

    rank: int
    losses: tuple[NonFinite, ...]
    own: tuple[NonFinite, ...]
    averaged: tuple[str, ...]

    @property
    def first(self) -> int:
        """The first micro-step in which it computed such a number."""
        return min(found.micro for found in (*self.losses, *self.own))


class GradientTrace:
    """Notes of each backward the loss and the norm of each gradient before ranks average them.

    Numbers stay on the device until somebody asks for evidence, which is when a step is known to be bad.
    """

    def __init__(self) -> None:
        self._hooked: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._losses: list[tuple[int, str, torch.Tensor]] = []
        self._noted: list[tuple[int, str, torch.Tensor]] = []
        self._micro = 0
        self._is_on = False

    @property
    def micro_steps(self) -> int:
        """Backwards since the last ``clear``."""
        return self._micro

    @contextmanager
    def backward(self, loss: torch.Tensor, models: Sequence[ParallelModel]) -> Iterator[None]:
        """Surround ``loss.backward()``; ``loss`` is 0-d."""
        self._micro += 1
        self._losses.append((self._micro, "the loss", size(loss.detach())))
        for number, model in enumerate(models):
            for name, leaf in autograd_leaves(model):
                if leaf not in self._hooked:
                    label = name if number == 0 else f"{name} (model {number})"
                    self._hooked[leaf] = leaf.register_hook(partial(self._note, label))
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _note(self, name: str, gradient: torch.Tensor) -> None:
        if self._is_on:
            self._noted.append((self._micro, name, size(local(gradient).detach())))

    def evidence(self, rank: int, models: Sequence[ParallelModel]) -> GradientEvidence:
        """Return what is not finite on this rank. Waits for the device."""
        averaged = [
            name
            for model in models
            for name, p in local_parameters(model)
            if p.grad is not None and not _dense(local(p.grad)).isfinite().all()
        ]
        return GradientEvidence(rank, _not_finite(self._losses), _not_finite(self._noted), tuple(averaged))

    def clear(self) -> None:
        """Forget the step, which is over."""
        self._losses.clear()
        self._noted.clear()
        self._micro = 0


def size(gradient: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm, 0-d: NaN where the gradient holds one, else infinite where it holds an infinity.

    That of finite numbers is infinite too if their squares overflow, so it can accuse, but not convict.
    """
    is_half = gradient.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(_dense(gradient), dtype=torch.float32 if is_half else None)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()


def _not_finite(noted: Iterable[tuple[int, str, torch.Tensor]]) -> tuple[NonFinite, ...]:
    values = [(micro, name, value.item()) for micro, name, value in noted]
    return tuple(
        NonFinite(micro, name, "NaN" if math.isnan(value) else "Inf")
        for micro, name, value in values
        if not math.isfinite(value)
    )


@torch.no_grad()
def any_not_finite(optimizer: Optimizer, communicator: Communicator | None) -> bool:
    """Return whether any gradient that the optimizer would step on has a NaN or infinity, on any rank of
    ``communicator``.

    Collective: one all-reduce of a number, and one wait for the device; a second of both where norms are infinite,
    which those of finite gradients may be. ``None``: look at this rank alone.
    """
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    parts = [_dense(local(gradient)) for gradient in gradients if gradient is not None]
    # One norm of all gradients is NaN or infinite where any element is.
    norm = get_total_norm([_wide(part) for part in parts]) if parts else torch.zeros(())
    if not _on_any_rank(~norm.isfinite(), communicator):
        return False
    # Norms of finite gradients may overflow. All ranks come here, since the flag was that of any.
    exact = [part.isfinite().all().cpu() for part in parts]
    return _on_any_rank(~torch.stack(exact).all() if exact else torch.tensor(False), communicator)


def _wide(part: torch.Tensor) -> torch.Tensor:
    """Convert float16 to float32: its norm would overflow where its elements do not."""
    return part.float() if part.dtype is torch.float16 else part


def _on_any_rank(flag: torch.Tensor, communicator: Communicator | None) -> bool:
    if communicator is not None and communicator.world_size > 1:
        flag = flag.to(device=communicator.runtime.device, dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def explain(step: int, micro_steps: int, evidence: Sequence[GradientEvidence]) -> str:
    """Say in one sentence which ranks' own numbers were bad, from the first on; or that only their mean is.

    Ranks that share a model pass what is bad on; the one whose loss is bad stands before them.
    """
    blamed = [one for one in evidence if one.own or one.losses]
    if not blamed:
        which = _names([name for one in evidence for name in one.averaged])
        return (
            f"Gradients of step {step} are not finite in {which}, although those of each rank were before they were "
            "averaged"
        )
    parts = []
    for one in sorted(blamed, key=lambda one: (one.first, not one.losses)):
        first = one.first
        own = [found for found in one.own if found.micro == first]
        kind = next(iter(own or one.losses)).kind
        where = _names([found.name for found in own]) if own else "its loss"
        loss = " and in its loss" if own and any(found.micro == first for found in one.losses) else ""
        micro = f" in micro-step {first} of {micro_steps}" if micro_steps > 1 else ""
        parts.append(f"{ranks_are([one.rank])} has {kind} in {where}{loss}{micro}")
    return f"Gradients of step {step} are not finite: {'; '.join(parts)}"


def _names(names: Sequence[str]) -> str:
    # A pipeline has several backwards in a micro-step.
    names = list(dict.fromkeys(names))
    return join_names((f"'{name}'" for name in names), none="no tensor that has a name")
