"""A model as it is spread over the ranks, and what everything else asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.dtensor import local
from lockstep.comm.tree import LossFunction
from lockstep.config.parallel import Parallel
from lockstep.config.world import ParallelDims
from lockstep.parallel.autocast import remove_autocast
from lockstep.torch_internals import compile as torch_compile
from lockstep.torch_internals import modules as torch_modules

if TYPE_CHECKING:
    from lockstep.parallel.ddp.replica import DistributedDataParallel
    from lockstep.parallel.gradient_mean import GradientAllReduce
    from lockstep.parallel.zero.sharding import Sharding

AutocastContext = Callable[[], AbstractContextManager[Any]]


class ModuleAround(nn.Module):
    """A module of ours around the user's own, which is its ``module``."""

    module: nn.Module


class ParallelModel:
    """A model that each rank runs by itself, with gradients of its own. Other ways to spread one are subclasses.

    Attributes:
        module: What the training loop calls.
        plain: The user's own model in it, not compiled.
        sharding: Of a model that ZeRO shards as a whole.
        is_summoned: Whether ``summoned`` is open.
        runs_micro_batches: Whether a call of it runs the parts of a batch one after another, as a pipeline does.
        holds_all_parameters: Whether this rank has a part of each of them, or all of it.
        averages_in_backward: Whether a backward ends with a wait for averages of gradients.
    """

    sharding: Sharding | None = None
    is_summoned = False
    runs_micro_batches = False
    holds_all_parameters = True
    averages_in_backward = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.plain = unwrap(module, keep_compile=False)

    # -- what it consists of -----------------------------------------------------------------------------

    def unwrap(self, keep_autocast: bool = True, keep_compile: bool = True) -> nn.Module:
        """Return the user's own model; see :func:`unwrap`."""
        return unwrap(self.module, keep_autocast, keep_compile)

    @property
    def shardings(self) -> list[Sharding]:
        """Of the model, or of its stages on this rank."""
        return [] if self.sharding is None else [self.sharding]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's, by the names that they have in the whole model."""
        yield from self.plain.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's."""
        return (parameter for _, parameter in self.named_parameters())

    def absent_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return what its ``module`` lists, by name, in the place of parameters that only other ranks have."""
        return {}

    def counted_elsewhere(self) -> set[int]:
        """Return ``id`` of parameters that another rank of the same pipeline counts in a norm."""
        return set()

    def on_settled(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once this rank holds its final parameters, if it does not from the beginning."""

    def settle_like(self, other: ParallelModel) -> None:
        """Hold the same parameters as an equal model, if that has settled."""

    @property
    def micro_batch(self) -> int | None:
        """Which part of the batch modules are called with now: 0, the whole; None: none of it, it is only tried."""
        return 0

    # -- gradients ---------------------------------------------------------------------------------------

    def no_sync(self, inside_window: bool = False) -> AbstractContextManager[object]:
        """Backward inside adds to this rank's gradients without averaging them over all ranks.

        ``inside_window``: as a micro-batch of an accumulation window, in which a sharded model may keep its
        gradients sharded.
        """
        # A model that the user has wrapped may have a ``no_sync`` of its own.
        its_own: Any = getattr(self.module, "no_sync", nullcontext)
        return its_own()

    def synchronised(self) -> AbstractContextManager[object]:
        """Backward inside averages gradients over all ranks, also within ``no_sync``."""
        return nullcontext()

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Prepare for the backward of this loss, of any shape; every rank takes part in it."""

    def reduce_gradients(self) -> None:
        """Average after backward what torch's engines leave to us, unless within ``no_sync``. Collective."""

    def check_gradients(self, optimizer: Optimizer | None, compares_copies: bool = True) -> None:
        """Raise UsageError before a step if a backward has left out gradients that other ranks wait for.

        Also if gradients that this ``optimizer`` steps on are this rank's own. None: they may be. And, with
        ``compares_copies``, if copies of a parameter differ between the ranks.
        """

    def gradients(self) -> Iterator[torch.Tensor]:
        """Return the tensors in which this rank accumulates gradients now."""
        yield from (local(p.grad) for p in self.parameters() if p.grad is not None)

    def own_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, gradient) of those that this rank keeps to itself until an accumulation window ends."""
        yield from ()

    @property
    def takes_buffers(self) -> bool:
        """Whether the next forward takes rank 0's buffers, as after a backward that averages. May be set."""
        return True

    @takes_buffers.setter
    def takes_buffers(self, value: bool) -> None:
        pass

    def mark_used(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gradients of these parameters will be loaded, and are to be averaged as if a backward had brought them."""

    # -- what its communication costs --------------------------------------------------------------------

    def communication_is_timed(self, parallel: Parallel, axes: ParallelDims, device: str) -> bool:
        """Return whether all waiting of the main thread for this model's messages is noted on the clock."""
        return device == "cpu"

    # -- a step ------------------------------------------------------------------------------------------

    @contextmanager
    def summoned(self) -> Iterator[None]:
        """Whole weights stand on this rank inside, and forwards of ``unwrap()`` send nothing. Collective."""
        if self.is_summoned:
            yield
            return
        try:
            with ExitStack() as stack:
                for sharding in self.shardings:
                    stack.enter_context(sharding.summoned())
                self.is_summoned = True
                yield
        finally:
            self.is_summoned = False

    def loss_of(
        self, function: LossFunction, inputs: object, targets: object, autocast: AutocastContext
    ) -> torch.Tensor:
        """Compute ``function(model(inputs), targets)``, micro-batch by micro-batch in a pipeline that trains."""
        args, keywords, targets = call_of(inputs, targets)
        return function(self.module(*args, **keywords), *targets)


class ReplicatedModel(ParallelModel):
    """Every rank has all of it; DDP averages gradients in backward."""

    averages_in_backward = True
    module: DistributedDataParallel

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__(module)
        self._has_seen_backward = False

    def no_sync(self, inside_window: bool = False) -> AbstractContextManager[object]:
        if self.module.static_graph and not self._has_seen_backward:
            # With a static graph DDP records the graph in its first backward, which must be a synchronised
            # one. Averaging early leaves the window's result the same: a mean of equal means is that mean.
            self._has_seen_backward = True
            return nullcontext()
        return self.module.no_sync()

    def synchronised(self) -> AbstractContextManager[object]:
        return self.module.synchronised()

    def backward_begins(self, loss: torch.Tensor) -> None:
        self.module.average_gradients_of(loss)

    @contextmanager
    def summoned(self) -> Iterator[None]:
        with self.module.without_buffers(), super().summoned():
            yield

    def check_gradients(self, optimizer: Optimizer | None, compares_copies: bool = True) -> None:
        self.module.check_reduced()
        if optimizer is not None:
            self.module.check_averaged(optimizer, compares_copies)

    def own_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.module.named_parameters():
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                yield name, parameter.grad

    def mark_used(self, parameters: Sequence[torch.Tensor]) -> None:
        self.module.mark_used(parameters)

    def communication_is_timed(self, parallel: Parallel, axes: ParallelDims, device: str) -> bool:
        return True

    @property
    def takes_buffers(self) -> bool:
        return not self.module.modules_buffers or bool(self.module.will_sync_module_buffers())

    @takes_buffers.setter
    def takes_buffers(self, value: bool) -> None:
        self.module.require_forward_param_sync = value


class SplitModel(ParallelModel):
    """Split within its layers (tp), by experts (ep) or over positions (cp); gradients are averaged after backward."""

    def __init__(self, module: nn.Module, mean: GradientAllReduce) -> None:
        super().__init__(module)
        self._mean = mean

    def no_sync(self, inside_window: bool = False) -> AbstractContextManager[object]:
        return self._mean.no_sync()

    def synchronised(self) -> AbstractContextManager[object]:
        return self._mean.synchronised()

    def reduce_gradients(self) -> None:
        self._mean.average()


class ShardedModel(SplitModel):
    """Sharded by ZeRO; ``mean`` is that of the parameters that every rank holds whole."""

    sharding: Sharding

    def __init__(self, module: nn.Module, sharding: Sharding, mean: GradientAllReduce) -> None:
        super().__init__(module, mean)
        self.sharding = sharding

    @contextmanager
    def no_sync(self, inside_window: bool = False) -> Iterator[None]:
        sharding = self.sharding
        with sharding.inside_window() if inside_window else sharding.no_sync(), self._mean.no_sync():
            yield

    @contextmanager
    def synchronised(self) -> Iterator[None]:
        with self.sharding.synchronised(), self._mean.synchronised():
            yield

    def backward_begins(self, loss: torch.Tensor) -> None:
        self.sharding.unused.backward_begins()

    def reduce_gradients(self) -> None:
        self.sharding.unused.backward_ends()
        if self.sharding.has_whole:
            super().reduce_gradients()

    def check_gradients(self, optimizer: Optimizer | None, compares_copies: bool = True) -> None:
        if optimizer is None:
            self.sharding.step_with_closure()
        else:
            self.sharding.check_step(optimizer)

    def gradients(self) -> Iterator[torch.Tensor]:
        yield from self.sharding.gradients()

    def communication_is_timed(self, parallel: Parallel, axes: ParallelDims, device: str) -> bool:
        from lockstep.parallel.zero.exchange import MOST_RANKS

        is_plain = not (parallel.quantized_weights or parallel.quantized_gradients)
        # Other forms are FSDP2's own collectives, which the clock does not see.
        is_ours = self.sharding.collectives and axes.replicate == 1 and axes.shard <= MOST_RANKS
        return is_plain and bool(is_ours)

    def own_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.sharding.own_gradients() if self.sharding.stage == 1 else ()


class PipelinedModel(ParallelModel):
    """Each rank holds some stages of it, which are known after its first forward.

    Attributes:
        stages: This rank's, as models that are sharded.
        mean: Averages gradients where they are not.
    """

    runs_micro_batches = True
    holds_all_parameters = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._pipeline: Any = module
        self.stages: Sequence[ShardedModel] = ()
        self.mean: GradientAllReduce | None = None

    @property
    def shardings(self) -> list[Sharding]:
        return [stage.sharding for stage in self.stages]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._pipeline.held_parameters()

    def absent_parameters(self) -> Mapping[str, nn.Parameter]:
        found: Mapping[str, nn.Parameter] = self._pipeline.absent_parameters()
        return found

    def on_settled(self, callback: Callable[[], object]) -> None:
        self._pipeline.on_settled(callback)

    def settle_like(self, other: ParallelModel) -> None:
        if isinstance(other, PipelinedModel):
            self._pipeline.settle_like(other._pipeline)

    @property
    def micro_batch(self) -> int | None:
        number: int | None = self._pipeline.micro_batch
        return number

    def communication_is_timed(self, parallel: Parallel, axes: ParallelDims, device: str) -> bool:
        return False

    def counted_elsewhere(self) -> set[int]:
        owned = {id(parameter) for parameter in self._pipeline.owned().values()}
        # A tied parameter has a copy on each stage that uses it; one of these ranks owns it.
        return {id(parameter) for parameter in self.parameters()} - owned

    @contextmanager
    def no_sync(self, inside_window: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            # Torch's schedules tell sharded stages when to reduce.
            stack.enter_context(self._pipeline.no_sync())
            for mean in self._means():
                stack.enter_context(mean.no_sync())
            yield

    @contextmanager
    def synchronised(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._pipeline.synchronised())
            for sharding in self.shardings:
                stack.enter_context(sharding.synchronised())
            for mean in self._means():
                stack.enter_context(mean.synchronised())
            yield

    def backward_begins(self, loss: torch.Tensor) -> None:
        for stage in self.stages:
            stage.backward_begins(loss)

    def reduce_gradients(self) -> None:
        for stage in self.stages:
            stage.reduce_gradients()
        if self.mean is not None:
            self.mean.average()

    def check_gradients(self, optimizer: Optimizer | None, compares_copies: bool = True) -> None:
        for stage in self.stages:
            stage.check_gradients(optimizer, compares_copies)

    def loss_of(
        self, function: LossFunction, inputs: object, targets: object, autocast: AutocastContext
    ) -> torch.Tensor:
        args, keywords, targets = call_of(inputs, targets)
        # ``train_step`` is no call of the module, so torch does not run these hooks.
        for hook in torch_modules.forward_pre_hooks_of(self.module):
            hook(self.module, args)
        with autocast():
            loss: torch.Tensor = self._pipeline.train_step(function, targets, args, keywords)
        return loss

    def _means(self) -> list[GradientAllReduce]:
        means = [stage._mean for stage in self.stages]
        return means if self.mean is None else [self.mean, *means]


def call_of(
    inputs: object, targets: object
) -> tuple[tuple[object, ...], dict[str, object], tuple[object, ...]]:
    """Return (arguments, keywords, targets of the loss) of a call; ``inputs``: one value, a tuple of them, or
    keywords."""
    args, keywords = ((), dict(inputs)) if isinstance(inputs, Mapping) else (_as_tuple(inputs), {})
    return args, keywords, _as_tuple(targets)


def _as_tuple(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def unwrap(module: nn.Module, keep_autocast: bool = True, keep_compile: bool = True) -> nn.Module:
    """Return the user's own model inside what the training loop calls."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, ModuleAround)
    if isinstance(module, wrappers):
        module = module.module
    inner: nn.Module = torch_compile.original(module)
    # It was compiled with the wrapper inside.
    if isinstance(inner, wrappers):
        inner = inner.module
        module = torch_compile.compiled_alike(inner, module)
    if not keep_autocast:
        remove_autocast(inner)
    return module if keep_compile else inner


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` returned ``module``.

    Examples:
        ```python
        import torch
        from lockstep.utils import is_compiled_module

        layer = torch.nn.Linear(4, 1)
        assert not is_compiled_module(layer)
        assert is_compiled_module(torch.compile(layer))
        ```
    """
    return torch_compile.is_compiled(module)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model inside of wrappers such as DDP: ``accelerator.unwrap_model`` without an ``Accelerator``.

    Args:
        model: A model that ``prepare`` returned, or any other.
        keep_fp32_wrapper: False: its forward no longer runs under autocast.
        keep_torch_compile: False: return the model that was compiled, and not the compiled one.
        recursive: Accepted, without effect.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import extract_model_from_parallel

        accelerator = Accelerator()
        plain = torch.nn.Linear(4, 1)
        assert extract_model_from_parallel(accelerator.prepare(plain)) is plain
        ```
    """
    return unwrap(model, keep_autocast=keep_fp32_wrapper, keep_compile=keep_torch_compile)
