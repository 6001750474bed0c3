"""Trains a fragment by the public road under a strategy, and plainly in one process; says what differs."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import LockstepError
from tests.parallel.split.host import Fragment, batch, loss_of, make_model
from tests.parallel.split.table import FRAGMENTS, words_of

STRATEGIES = {
    "tp": "tp=2",
    "ring": "cp=2",
    "ulysses": "cp=2 cp_method=ulysses",
    "pp": "pp=2",
    "ep": "ep=2",
}
RATE, RANKS = 0.1, 2
LOSS_TOLERANCE, UPDATE_TOLERANCE, ROUNDING = 2e-5, 2e-3, 1e-6


@dataclass(frozen=True)
class Outcome:
    """``word``: equal, refused, refused late, differs or crashed."""

    word: str
    text: str = ""


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def expected(fragment: Fragment, strategy: str) -> list[Trained]:
    """For each rank what one process computes, by plain torch."""
    has_experts = strategy == "ep"
    count = RANKS if has_experts and not fragment.together else 1
    models = [make_model(fragment, has_experts) for _ in range(count)]
    before = _state(models[0])
    optimizers = [torch.optim.SGD(model.parameters(), RATE) for model in models]
    losses: list[list[float]] = []
    for step in range(fragment.steps):
        batches = [batch(fragment, step, rank) for rank in range(RANKS if has_experts else 1)]
        if fragment.together and has_experts:
            batches = [{name: torch.cat([one[name] for one in batches]) for name in batches[0]}]
        for model in models[1:]:  # data parallel takes rank 0's buffers into each forward
            for mine, first in zip(model.buffers(), models[0].buffers(), strict=True):
                mine.copy_(first)
        losses.append([])
        for model, given in zip(models, batches, strict=True):
            loss = loss_of(fragment, model(**given), given["labels"])
            loss.backward()
            losses[-1].append(loss.item())
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            if any(p.grad is not None for p in parameters):
                for p in parameters:
                    p.grad = torch.stack(gradients).mean(0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [
        Trained(
            [step[min(rank, len(step) - 1)] for step in losses],
            before,
            _state(models[min(rank, len(models) - 1)]),
        )
        for rank in range(RANKS)
    ]


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def outcome(name: str, strategy: str, verify: str = "first_step") -> Outcome:
    """Of this rank."""
    fragment = FRAGMENTS[name]
    wanted = expected(fragment, strategy)
    words = f"{STRATEGIES[strategy]} {words_of(name, strategy)} verify={verify}"
    accelerator = None
    steps = 0
    try:
        accelerator = Accelerator(cpu=True, parallel=words)
        model = make_model(fragment, strategy == "ep")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), RATE))
        rank = accelerator.process_index
        losses = []
        for steps in range(fragment.steps):
            given = batch(fragment, steps, rank if strategy == "ep" else 0)
            loss = loss_of(fragment, model(**given), given["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = accelerator.get_state_dict(model)
    except LockstepError as error:
        return Outcome("refused" if steps == 0 else "refused late", str(error))
    except Exception:
        return Outcome("crashed", traceback.format_exc())
    finally:
        if accelerator is not None:
            accelerator.free_memory()
    return _compared(losses, state, wanted[rank], together=fragment.together and strategy == "ep")


def _compared(losses: list[float], state: dict[str, Tensor], wanted: Trained, together: bool) -> Outcome:
    pairs = [] if together else zip(losses, wanted.losses, strict=True)
    if any(abs(mine - theirs) > LOSS_TOLERANCE * max(1, abs(theirs)) for mine, theirs in pairs):
        return Outcome("differs", f"losses {losses} instead of {wanted.losses}")
    if state and set(state) != set(wanted.after):
        return Outcome("differs", f"names {sorted(set(state) ^ set(wanted.after))[:4]}")
    largest = max((wanted.after[n].double() - wanted.before[n].double()).norm().item() for n in wanted.after)
    for name, value in state.items():
        after, before = wanted.after[name].double(), wanted.before[name].double()
        update = (after - before).norm().item()
        allowed = UPDATE_TOLERANCE * max(update, 1e-2 * min(largest, 1.0)) + ROUNDING * after.norm().item()
        apart = (value.double() - after).norm().item()
        if not apart <= allowed:
            return Outcome(
                "differs", f"'{name}' by {apart}, of an update of {update}; losses {losses} {wanted.losses}"
            )
    return Outcome("equal")


def outcomes(names: list[str], strategy: str, verify: str = "first_step") -> dict[str, tuple[str, str]]:
    torch.set_num_threads(1)
    found = {}
    for name in names:
        torch.manual_seed(7)
        result = outcome(name, strategy, verify)
        found[name] = (result.word, result.text)
    return found
