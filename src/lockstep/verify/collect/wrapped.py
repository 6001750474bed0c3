"""A run of a script that spreads its models itself, by torch's own means or another library's.

Such a script is seen from torch: its model is the outermost module that is called and holds parameters of an optimizer.
"""

from __future__ import annotations

import sys
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from lockstep.comm.dtensor import is_dtensor
from lockstep.config.options import Options
from lockstep.errors import UsageError
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.runtime.step import StepState
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.verify.collect.batch_position import BatchPosition
from lockstep.verify.collect.plain_calls import step_schedulers_when
from lockstep.verify.collect.process import ProcessRun
from lockstep.verify.collect.reported_ranks import report_world_size
from lockstep.verify.collect.spanning import refuse_synchronised_statistics
from lockstep.verify.collect.virtual_ranks import RanksInTurn, VirtualRanks, batches_for
from lockstep.verify.spec import Role, RunSpec

if TYPE_CHECKING:
    from lockstep.torch_internals.fsdp2_gathered import ShardedModule


class WrappedRun(ProcessRun):
    """One process of it: what torch is asked to do is seen from the construction on, to the end of the process."""

    instead = (
        "A script that spreads its models itself cannot be compared with another reference. Check it without "
        "--reference."
    )

    def __init__(self, spec: RunSpec, rank: int) -> None:
        super().__init__(spec, rank)
        self._state = StepState()
        self._optimizers: list[Optimizer] = []
        self._depth = 0
        self._kinds: set[type] = set()
        self._is_reading = False
        self._has_drawn_batch = False
        ranks = spec.ranks if spec.is_alone else 1
        self._facts = replace(self._facts, data_ranks=spec.ranks, data_rank=rank)
        if ranks > 1:
            turns = RanksInTurn(
                ranks, self._state, self._models, spec.seed, False, self._data_ended, self.refuse
            )
            self.place = VirtualRanks(turns, self._optimizers)
            step_schedulers_when(self.place.schedules)
        else:
            self.place = BatchPosition(rank, self._models, spec.seed)
        if spec.reports_ranks:
            report_world_size(spec.ranks)
        self.place.on_batch = self._batch_comes
        self._see_optimizers()
        self._see_batches()
        self._order_alike()
        self._see_clipping()
        self._see_autocast()
        nn.modules.module.register_module_forward_pre_hook(self._before_module)
        nn.modules.module.register_module_forward_hook(self._after_module, always_call=True)

    def options(self, options: Options) -> Options:
        """Refuse an ``Accelerator`` of this library.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "The script makes an Accelerator of Lockstep, which spreads its models. Drop --wrapped."
        )

    # Models -----------------------------------------------------------------------------------------------

    def _before_module(self, module: nn.Module, args: object) -> None:
        # Blocks that are recomputed are called in backward too, outside of their model.
        if torch_autograd.is_in_backward():
            return
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and not self._is_known(module):
            parameters = {
                id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]
            }
            if any(id(parameter) in parameters for parameter in nn.Module.parameters(module)):
                model = ParallelModel(module)
                self._prepared(model)
                # The hooks that it has got now see only later calls.
                self.forward_comes(model)

    def _prepared(self, model: ParallelModel) -> None:
        if self.place.has_all_ranks:
            refuse_synchronised_statistics(model, False, self.refuse)
        if isinstance(self.place, VirtualRanks):
            self.place.buffers.share(model, getattr(model.module, "broadcast_buffers", False))
        self.model_prepared(model)

    def _after_module(self, module: nn.Module, args: object, output: object) -> None:
        if not torch_autograd.is_in_backward():
            self._depth -= 1

    def _is_known(self, module: nn.Module) -> bool:
        return any(model.module is module for model in self._models)

    def _at_rest(self) -> None:
        for model in self._models:
            for module in _sharded(model.module):
                module.reshard()

    # Optimizers -------------------------------------------------------------------------------------------

    def _see_optimizers(self) -> None:
        construct: Callable[..., None] = Optimizer.__init__
        run = self

        @wraps(construct)
        def init(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
            construct(optimizer, *args, **kwargs)
            run._watch(optimizer)

        Optimizer.__init__ = init  # type: ignore[method-assign,assignment]

    def _watch(self, optimizer: Optimizer) -> None:
        if any(known is optimizer for known in self._optimizers):
            return
        self._optimizers.append(optimizer)
        self.optimizer_prepared(optimizer)
        step: Callable[..., object] = type(optimizer).step
        zero_grad: Callable[..., object] = type(optimizer).zero_grad
        run = self

        def paced_step(self: Optimizer, *args: object, **kwargs: object) -> object:
            return run._paced(self, lambda: step(self, *args, **kwargs))

        def paced_zero_grad(self: Optimizer, *args: object, **kwargs: object) -> None:
            if run.place.clears():
                zero_grad(self, *args, **kwargs)

        # Methods, because schedulers look for the function of one.
        vars(optimizer)["step"] = types.MethodType(paced_step, optimizer)
        vars(optimizer)["zero_grad"] = types.MethodType(paced_zero_grad, optimizer)

    def _paced(self, optimizer: Optimizer, step: Callable[[], object]) -> object:
        place = self.place
        if not isinstance(place, VirtualRanks):
            self._at_rest()
            return step()
        return place.step(optimizer, lambda: step() if self._state.sync_gradients else None)

    def _see_clipping(self) -> None:
        clip_norm: Callable[..., Tensor] = nn.utils.clip_grad_norm_
        clip_value: Callable[..., None] = nn.utils.clip_grad_value_

        def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], *args: object, **kwargs: object) -> Tensor:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            # They are gradients of some ranks alone.
            if not self._state.sync_gradients:
                return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            self.before_clip()
            norm = clip_norm(parameters, *args, **kwargs)
            whole: Tensor = norm.full_tensor() if is_dtensor(norm) else norm
            self.clipped(whole)
            return norm

        def clip_grad_value_(parameters: Tensor | Iterable[Tensor], *args: object, **kwargs: object) -> None:
            if self._state.sync_gradients:
                parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
                self.before_clip()
                clip_value(parameters, *args, **kwargs)
                self.clipped(None)

        for owner in (nn.utils, nn.utils.clip_grad):
            vars(owner)["clip_grad_norm_"] = clip_grad_norm_
            vars(owner)["clip_grad_value_"] = clip_grad_value_

    # Batches ----------------------------------------------------------------------------------------------

    def _see_batches(self) -> None:
        construct: Callable[..., None] = DataLoader.__init__
        run = self

        @wraps(construct)
        def init(loader: DataLoader[object], *args: object, **kwargs: object) -> None:
            construct(loader, *args, **kwargs)
            # A class's own __iter__ hides one that was wrapped further up, so that each of them is wrapped.
            for kind in type(loader).__mro__:
                if issubclass(kind, DataLoader) and "__iter__" in vars(kind):
                    run._see_iterations(kind)
            for kind in _loaders_of_accelerate():
                run._see_iterations(kind)

        DataLoader.__init__ = init  # type: ignore[method-assign,assignment]

    def _see_iterations(self, kind: Any) -> None:
        iterate, run = kind.__iter__, self
        if kind in self._kinds:
            return
        self._kinds.add(kind)

        def batches(loader: DataLoader[object]) -> Iterator[object]:
            # Another loader reads from this one.
            if run._is_reading:
                return iterate(loader)
            return run.place.batches(run._outermost(loader, iterate))

        kind.__iter__ = batches

    def _outermost(
        self, loader: DataLoader[object], iterate: Callable[[DataLoader[object]], Iterator[object]]
    ) -> Iterator[object]:
        batches = self._of_all_ranks(loader, iterate)
        while True:
            self._is_reading = True
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._is_reading = False
            yield batch

    def _order_alike(self) -> None:
        """Let samplers that were made without a generator draw one order on one process and on several."""
        construct: Callable[..., None] = RandomSampler.__init__
        iterate, seed = RandomSampler.__iter__, self._spec.seed
        times: Counter[int] = Counter()

        def init(sampler: RandomSampler, *args: object, **kwargs: object) -> None:
            construct(sampler, *args, **kwargs)
            # Accelerate gives it one, on several processes.
            if sampler.generator is None:
                times[id(sampler)] = 1

        def order(sampler: RandomSampler) -> Iterator[int]:
            if id(sampler) in times:
                # Each epoch draws another order, but the same one on all processes.
                drawn = zlib.crc32(f"{seed} order {times[id(sampler)]}".encode())
                times[id(sampler)] += 1
                sampler.generator = torch.Generator().manual_seed(drawn)
            yield from iterate(sampler)

        RandomSampler.__init__ = init  # type: ignore[method-assign,assignment]
        RandomSampler.__iter__ = order  # type: ignore[method-assign]

    def _of_all_ranks(
        self, loader: DataLoader[object], iterate: Callable[[DataLoader[object]], Iterator[object]]
    ) -> Iterator[object]:
        """Yield the batches of a loader; of one whose sampler knows of ranks those of all of them, in turn."""
        sampler = _distributed_sampler(loader)
        self._has_drawn_batch |= sampler is not None
        if not self.place.has_all_ranks or sampler is None:
            yield from self._whole_rounds(loader, iterate(loader))
            return
        ranks = self._spec.ranks
        iterators = []
        for rank in range(ranks):
            of_rank: DistributedSampler[int] = DistributedSampler(
                sampler.dataset, ranks, rank, sampler.shuffle, sampler.seed, sampler.drop_last
            )
            # The loader reads from the sampler that it has: that becomes each rank's, and lists its order.
            vars(sampler).update(vars(of_rank), epoch=sampler.epoch)
            iterators.append(iter(list(sampler)))
        yield from _in_turn(loader, iterators)

    def _whole_rounds(self, loader: DataLoader[object], batches: Iterator[object]) -> Iterator[object]:
        """Stop where ranks would have different numbers of batches."""
        length = _length(loader)
        for number, batch in enumerate(batches):
            if self.place.has_all_ranks and self._is_training() and length is not None:
                ranks = self._spec.ranks
                if number % ranks == 0 and length - number < ranks:
                    self._data_ended(batches_for(length - number, ranks))
            yield batch

    def _is_training(self) -> bool:
        return not self._models or any(model.module.training for model in self._models)

    # Precision --------------------------------------------------------------------------------------------

    def _see_autocast(self) -> None:
        construct, run = torch.autocast.__init__, self

        @wraps(construct)
        def init(
            context: torch.autocast,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            **kwargs: Any,
        ) -> None:
            if enabled:
                dtype_used = dtype or torch.get_autocast_dtype(device_type)
                word = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype_used, "no")
                run._facts = replace(run._facts, mixed_precision=word)
            is_on = enabled and run._spec.role in (Role.HALF, Role.CANDIDATE)
            construct(context, device_type, dtype, is_on, **kwargs)

        torch.autocast.__init__ = init  # type: ignore[method-assign,assignment]

    def finish(self) -> None:
        if dist.is_available() and dist.is_initialized() and not self._spec.is_alone:
            self._facts = replace(self._facts, parallel="")
        knows_rows = self._has_drawn_batch or bool(_loaders_of_accelerate())
        self._facts = replace(self._facts, knows_rows=knows_rows)
        super().finish()


def _sharded(model: nn.Module) -> list[ShardedModule]:
    """Return the modules that torch's ``fully_shard`` has changed."""
    return [module for module in model.modules() if callable(getattr(module, "reshard", None))]


def _distributed_sampler(loader: DataLoader[object]) -> DistributedSampler[int] | None:
    sampler = loader.sampler
    return sampler if isinstance(sampler, DistributedSampler) else None


def _loaders_of_accelerate() -> list[type]:
    """Return Accelerate's classes of loaders, which read from another loader, and a batch ahead of the script."""
    module = sys.modules.get("accelerate.data_loader")
    names = ("DataLoaderShard", "DataLoaderDispatcher")
    return [getattr(module, name) for name in names if hasattr(module, name)]


def _in_turn(loader: DataLoader[object], orders: list[Iterator[int]]) -> Iterator[object]:
    """Batches of each order, one of each after another, as the loader would make them."""
    size, collate, dataset = loader.batch_size or 1, loader.collate_fn, loader.dataset
    while True:
        for order in orders:
            rows = [dataset[index] for _, index in zip(range(size), order, strict=False)]
            if not rows or (loader.drop_last and len(rows) < size):
                return
            yield collate(rows)


def _length(loader: DataLoader[object]) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
