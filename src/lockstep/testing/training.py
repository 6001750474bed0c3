"""One process of a run: makes what is trained, and trains it, while a ``PreparedRun`` looks on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.accelerator import Accelerator
from lockstep.config.sources import process_environment
from lockstep.observe.run_observer import RunObserver
from lockstep.runtime.seed import set_seed
from lockstep.testing.case import ParityCase
from lockstep.verify.collect.plain_calls import observe_backward
from lockstep.verify.collect.prepared import PreparedRun
from lockstep.verify.spec import RunSpec

LossOfBatch = Callable[[Any, Any], Tensor]
FOUR = "It has to return model, optimizer, batches and loss."


class RefusedCase(Exception):
    """A sentence on what ``make`` has returned."""


class RunEnded(Exception):
    """There are no more batches that go round all ranks."""


class WarmRun(PreparedRun):
    """A run whose process lives on."""

    has_all_steps = False

    def all_steps_made(self, made: int) -> None:
        self.has_all_steps = True

    def end(self) -> NoReturn:
        raise RunEnded


def run_case(case: ParityCase, spec: RunSpec) -> str | None:
    """Train as ``spec`` says, and leave what was found in its folder; or say why that is not possible."""
    run = WarmRun(spec, process_environment(need_rendezvous=False).rank)
    RunObserver.registered.append(run)
    end_observation = observe_backward(run)
    try:
        set_seed(spec.seed)
        _train(case, run)
    except RefusedCase as refusal:
        return str(refusal)
    except RunEnded:
        pass
    finally:
        end_observation()
        # Backwards, as each puts back what it has found.
        for restore in reversed(run.restores):
            restore()
        RunObserver.registered.remove(run)
    run.finish()
    return None


def _train(case: ParityCase, run: WarmRun) -> None:
    model, optimizer, loader, loss = _make_objects(case)
    accelerator = Accelerator(
        cpu=True,
        parallel=case.parallel,
        mixed_precision=case.mixed_precision,
        gradient_accumulation_steps=case.accumulation_steps,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            value = loss(model, batch)
            _check_loss(case, value)
            accelerator.backward(value)
            if case.max_grad_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), case.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        if run.has_all_steps:
            return
    raise RefusedCase(
        f"The batches of make() ({case.name}) end after {run.made} of {case.steps} steps on {case.nproc} ranks. Make "
        f"{case.batches_needed} of equal size."
    )


def _make_objects(case: ParityCase) -> tuple[nn.Module, Optimizer, DataLoader[object], LossOfBatch]:
    made = case.make()
    if not isinstance(made, (tuple, list)) or len(made) != 4:
        what = (
            f"{len(made)} values" if isinstance(made, (tuple, list)) else f"a value of type {_type_of(made)}"
        )
        raise RefusedCase(f"make() ({case.name}) has returned {what}. {FOUR}")
    model, optimizer, batches, loss = made
    _check_type(case, model, nn.Module, "model", "a torch.nn.Module")
    _check_type(case, optimizer, Optimizer, "optimizer", "a torch.optim.Optimizer")
    _check_type(case, batches, (DataLoader, Sequence), "batches", "a list of batches or a torch DataLoader")
    if loss is not None and not callable(loss):
        raise RefusedCase(
            f"The loss of make() ({case.name}) is a {_type_of(loss)}, but must be a function of model and batch. "
            "Return a function, or None to use model(**batch).loss."
        )
    _check_count(case, batches)
    loader = batches if isinstance(batches, DataLoader) else DataLoader(batches, None, collate_fn=_as_it_is)
    return model, optimizer, loader, loss or _loss_of_output


def _check_type(
    case: ParityCase, value: object, types: type | tuple[type, ...], name: str, expected: str
) -> None:
    if not isinstance(value, types) or isinstance(value, (str, bytes)):
        raise RefusedCase(
            f"The {name} of make() ({case.name}) is a {_type_of(value)}, but must be {expected}. {FOUR}"
        )


def _check_count(case: ParityCase, batches: DataLoader[object] | Sequence[object]) -> None:
    try:
        count = len(batches)
    except TypeError:
        # It is a stream, whose end will show.
        return
    if count < case.batches_needed:
        windows = f" x {case.accumulation_steps} micro-batches" if case.accumulation_steps > 1 else ""
        ranks = case.batches_needed // (case.steps * case.accumulation_steps)
        own = "rank has" if ranks == 1 else "ranks have"
        raise RefusedCase(
            f"make() ({case.name}) has {count} batches, but {case.steps} steps{windows} take {case.batches_needed}, as "
            f"{ranks} {own} batches of their own with nproc={case.nproc} and parallel='{case.parallel}'. Make more "
            "batches, or check fewer steps."
        )


def _check_loss(case: ParityCase, value: object) -> None:
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        return
    what = f"a tensor of shape {list(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else ""
    raise RefusedCase(
        f"The loss of make() ({case.name}) has returned {what or 'a value of type ' + _type_of(value)}, but must "
        "return a 0-d tensor of floats. Return a mean over the batch."
    )


def _loss_of_output(model: nn.Module, batch: Any) -> Tensor:
    if not isinstance(batch, dict) and not hasattr(batch, "keys"):
        raise RefusedCase(
            f"Without a loss function the loss is model(**batch).loss, but a batch is a {_type_of(batch)}. Make "
            "batches that are dicts, or return a function loss(model, batch)."
        )
    output = model(**batch)
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None:
        raise RefusedCase(
            f"Without a loss function the loss is model(**batch).loss, but the output of {type(model).__name__} "
            "has no loss. Pass labels in the batches, or return a function loss(model, batch)."
        )
    return found


def _as_it_is(batch: object) -> object:
    return batch


def _type_of(value: object) -> str:
    return type(value).__name__
