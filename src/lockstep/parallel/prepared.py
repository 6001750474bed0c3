"""What the training loop does with prepared models, whichever way they are spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.comm.dtensor import local
from lockstep.parallel.autocast import remove_autocast
from lockstep.parallel.gradient_mean import gradient_mean_of
from lockstep.parallel.replica import DistributedDataParallel
from lockstep.parallel.sharding import sharding_of
from lockstep.torch_internals import compile as torch_compile
from lockstep.torch_internals import modules as torch_modules


def hold_back(model: nn.Module, inside_window: bool) -> AbstractContextManager[Any]:
    """Backward inside adds to this rank's gradients without averaging them over all ranks.

    ``inside_window``: as a micro-batch of an accumulation window, in which a sharded model may keep its
    gradients sharded.
    """
    stack = ExitStack()
    if is_pipeline(model):  # torch's schedules tell sharded stages when to reduce
        stack.enter_context(model.no_sync())  # type: ignore[operator]
    elif (sharding := sharding_of(model)) is not None:
        stack.enter_context(sharding.inside_window() if inside_window else sharding.no_sync())
    means = [mean for part in parts(model) if (mean := gradient_mean_of(part)) is not None]
    for mean in means:
        stack.enter_context(mean.no_sync())
    if means or is_pipeline(model):
        return stack
    if not hasattr(model, "no_sync"):
        return nullcontext()
    if getattr(model, "static_graph", False) and not getattr(model, "_saw_backward", False):
        # With a static graph DDP records the graph in its first backward, which must be a synchronised
        # one. Averaging early leaves the window's result the same: a mean of equal means is that mean.
        model._saw_backward = True  # type: ignore[assignment]
        return nullcontext()
    no_sync: Any = model.no_sync
    context: AbstractContextManager[Any] = no_sync()
    return context


@contextmanager
def synchronised(model: nn.Module) -> Iterator[None]:
    """Backward inside averages gradients over all ranks, also within ``hold_back``."""
    with ExitStack() as stack:
        if is_pipeline(model):
            stack.enter_context(model.synchronised())  # type: ignore[operator]
        for part in parts(model):
            if (sharding := sharding_of(part)) is not None:
                stack.enter_context(sharding.synchronised())
            if (mean := gradient_mean_of(part)) is not None:
                stack.enter_context(mean.synchronised())
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(model.synchronised())
        yield


def backward_begins(model: nn.Module) -> None:
    """Tell a model that a backward of the training loop comes, in which every rank takes part."""
    for part in parts(model):
        sharding = sharding_of(part)
        if sharding is not None:
            sharding.unused.backward_begins()


def average_gradients(model: nn.Module) -> None:
    """Average after backward what torch's engines leave to us, unless that is held back. Collective."""
    for part in parts(model):
        sharding, mean = sharding_of(part), gradient_mean_of(part)
        if sharding is not None:
            sharding.unused.backward_ends()
        if mean is not None:
            mean.average()


def check_reduced(model: nn.Module) -> None:
    """Raise UsageError if a backward has left out gradients that other ranks wait for."""
    if isinstance(model, DistributedDataParallel):
        model.check_reduced()


def check_averaged(model: nn.Module, stepped: Callable[[], set[int]]) -> None:
    """Raise UsageError before a step of these parameters (by ``id``) if their gradients are this rank's own."""
    if isinstance(model, DistributedDataParallel):
        model.check_averaged(stepped)
    for part in parts(model):
        sharding = sharding_of(part)
        if sharding is not None:
            sharding.check_reduced(stepped)


def is_pipeline(model: nn.Module) -> bool:
    """Whether each rank holds some stages of this model."""
    return hasattr(type(model), "stage_modules")


def parts(model: nn.Module) -> list[nn.Module]:
    """The model, and the stages of this rank of a pipeline that has run."""
    if not is_pipeline(model):
        return [model]
    pipeline: Any = model
    return [model, *(pipeline.stage_modules() if pipeline.settled else ())]


def loss_of(
    model: nn.Module,
    loss_function: Callable[..., torch.Tensor],
    inputs: Any,
    targets: Any,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> torch.Tensor:
    """``loss_function(model(inputs), targets)``, micro-batch by micro-batch in a pipeline that trains."""
    args, keywords, targets = call_of(inputs, targets)
    if is_pipeline(model):
        pipeline: Any = model
        for hook in torch_modules.forward_pre_hooks_of(pipeline):  # as a call of the model would
            hook(pipeline, args)
        with autocast():
            loss: torch.Tensor = pipeline.train_step(loss_function, targets, args, keywords)
        return loss
    return loss_function(model(*args, **keywords), *targets)


def call_of(inputs: Any, targets: Any) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """(arguments, keywords, targets of the loss) of a call; ``inputs``: one value, a tuple of them, or keywords."""
    args, keywords = ((), dict(inputs)) if isinstance(inputs, Mapping) else (_as_tuple(inputs), {})
    return args, keywords, _as_tuple(targets)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors in which this rank accumulates the model's gradients now."""
    sharding = sharding_of(model)
    if sharding is not None:
        yield from sharding.gradients()
    else:
        yield from (local(p.grad) for p in model.parameters() if p.grad is not None)


def own_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, gradient) of those that this rank keeps to itself until an accumulation window ends."""
    sharding = sharding_of(model)
    if sharding is not None:
        yield from sharding.own_gradients() if sharding.stage == 1 else ()
    elif isinstance(model, DistributedDataParallel):
        for name, parameter in model.module.named_parameters():
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                yield name, parameter.grad


def unwrap(model: nn.Module, keep_autocast: bool = True, keep_compile: bool = True) -> nn.Module:
    """The user's own model inside what ``spread`` returned."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or is_pipeline(model):
        model = model.module  # type: ignore[assignment]
    inner: nn.Module = torch_compile.original(model)
    if not keep_autocast:
        remove_autocast(inner)
    return model if keep_compile else inner


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` returned this module."""
    return torch_compile.is_compiled(module)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """``unwrap`` under the name and arguments that scripts know."""
    return unwrap(model, keep_autocast=keep_fp32_wrapper, keep_compile=keep_torch_compile)
