"""Defects, as they were reported of engines that train on many ranks: planted in the engine of this process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from inspect import getmodule
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Planting = Callable[["Planted"], None]
DEFECTS: dict[str, Planting] = {}


class Planted:
    """What a defect changes of a script, beside the engine: nothing, unless it sets one of these."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.on_made: Callable[..., None] = lambda model, optimizer, scheduler: None
        self.on_prepared: Callable[..., None] = lambda accelerator, model, optimizer: None

    def made(self, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        """What will be prepared was made."""
        self.on_made(model, optimizer, scheduler)

    def prepared(self, accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        """It was prepared."""
        self.on_prepared(accelerator, model, optimizer)


def plant(name: str) -> Planted:
    """The defect of this name."""
    planted = Planted()
    DEFECTS[name](planted)
    return planted


def defect(planting: Planting) -> Planting:
    """Known by the name of its function."""
    DEFECTS[planting.__name__] = planting
    return planting


# DistributedDataParallel ---------------------------------------------------------------------------------


def _with_hook(change: Callable[[Any], None]) -> None:
    """Let DDP do with a bucket what ``change`` does, in the place of an average."""
    from lockstep.parallel.ddp import gradient_hook

    def hook(state: object, bucket: Any) -> Any:
        change(bucket)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__.clear()  # DDP compares them with types
    getmodule(gradient_hook).gradient_hook = lambda options, group=None: (None, hook)


def _average(tensor: Tensor, group: Any = None) -> None:
    dist.all_reduce(tensor, group=group)
    tensor.div_(dist.get_world_size(group))


@defect
def gradients_not_reduced(planted: Planted) -> None:
    _with_hook(lambda bucket: None)


@defect
def gradients_of_the_step_before(planted: Planted) -> None:
    kept: dict[int, Tensor] = {}

    def late(bucket: Any) -> None:
        _average(bucket.buffer())
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            new = gradient.clone()
            gradient.copy_(kept.get(id(parameter), new))
            kept[id(parameter)] = new

    _with_hook(late)


# Accumulation, scale of the loss, weights of it ----------------------------------------------------------


@defect
def losses_not_divided_by_the_accumulation_steps(planted: Planted) -> None:
    from lockstep.train import Accumulation

    scale = Accumulation.scale

    def undivided(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return scale(self, loss, *args, **kwargs) * 2

    Accumulation.scale = undivided


@defect
def gradients_not_set_to_zero(planted: Planted) -> None:
    def prepared(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad = lambda *args, **kwargs: None

    planted.on_prepared = prepared


class _Changed:
    """A module with other functions of these names."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self.__dict__.update(functions, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# ZeRO ----------------------------------------------------------------------------------------------------


def _reduce_scatter(change: Callable[..., None]) -> None:
    """``change`` gets the collective's own function and its arguments."""
    from lockstep.parallel.zero import ExchangeReduceScatter

    original = ExchangeReduceScatter.__call__

    def changed(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        def reduce(given: Tensor, by: Any = op) -> None:
            original(self, output_tensor, given, group, by, async_op)

        return change(reduce, output_tensor, input_tensor, group)

    ExchangeReduceScatter.__call__ = changed


@defect
def shards_swapped(planted: Planted) -> None:
    def swapped(reduce: Any, output: Tensor, given: Tensor, group: Any) -> None:
        reduce(given.view(group.size(), -1).flip(0).reshape(-1))

    _reduce_scatter(swapped)


@defect
def weights_gathered_before_the_step(planted: Planted) -> None:
    from lockstep.parallel.zero import BroadcastAllGather

    original = BroadcastAllGather.__call__
    first: dict[int, Tensor] = {}

    def stale(self: Any, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, output_tensor, *args, **kwargs)
        output_tensor.copy_(first.setdefault(id(self), output_tensor.clone()))
        return result

    BroadcastAllGather.__call__ = stale


@defect
def norm_of_one_shard(planted: Planted) -> None:
    from lockstep.comm import local
    from lockstep.train import clip_norm

    clipping = getmodule(clip_norm)
    total = clipping.total_norm
    clipping.total_norm = lambda gradients, *args: total([local(one) for one in gradients], *args)


# Optimizer -----------------------------------------------------------------------------------------------


@defect
def scheduler_steps_twice(planted: Planted) -> None:
    from lockstep.train import PreparedScheduler

    made = PreparedScheduler.__init__

    def twice(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.steps_per_call *= 2

    PreparedScheduler.__init__ = twice


@defect
def step_skipped_on_one_rank(planted: Planted) -> None:
    def prepared(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        step, made = optimizer.step, itertools.count(1)

        def skips(*args: Any) -> Any:
            if not accelerator.sync_gradients or planted.rank != 1 or next(made) != 2:
                return step(*args)
            return None

        optimizer.step = skips

    planted.on_prepared = prepared


# Data, seeds, buffers ------------------------------------------------------------------------------------


@defect
def other_weights_on_one_rank(planted: Planted) -> None:
    def prepared(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        if planted.rank == 1:
            accelerator.unwrap_model(model).inner.weight.detach().add_(0.01)

    planted.on_prepared = prepared


@defect
def another_mask_of_dropout(planted: Planted) -> None:
    def prepared(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        if planted.rank == 1:
            drop = accelerator.unwrap_model(model).drop
            drop.register_forward_pre_hook(lambda *_: torch.manual_seed(17) and None)

    planted.on_prepared = prepared


# Tensor and sequence parallel ----------------------------------------------------------------------------


def _function(name: str, side: str, change: Callable[..., Any]) -> None:
    """``change`` in the place of one side of a communication, forward or backward."""
    from lockstep.parallel.tensor import scatter_sequence

    cls = getattr(getmodule(scatter_sequence), name)
    setattr(cls, side, staticmethod(change(getattr(cls, side))))


@defect
def gradients_of_columns_not_summed(planted: Planted) -> None:
    _function("_Copy", "backward", lambda _: lambda ctx, gradient: (gradient, None))


# Pipelines -----------------------------------------------------------------------------------------------


def _deposit(change: Callable[..., Any]) -> None:
    """``change`` gets the sum of a tied weight's gradients, in the place of its all-reduce."""
    from lockstep.parallel.pipeline import GradientAccumulator

    getmodule(GradientAccumulator).dist = _Changed(dist, all_reduce=change)


@defect
def tied_gradient_lost(planted: Planted) -> None:
    _deposit(lambda tensor, group: None)


# Context parallel ----------------------------------------------------------------------------------------


@defect
def loss_of_own_positions_alone(planted: Planted) -> None:
    from lockstep.parallel.context import SequenceLayout

    def alone(output: Tensor, given: Tensor, group: Any = None) -> None:
        output.copy_(given.chunk(group.size())[group.rank()])

    getmodule(SequenceLayout).reduce_scatter_tensor = alone


# Experts -------------------------------------------------------------------------------------------------


@defect
def gradients_of_experts_summed(planted: Planted) -> None:
    from lockstep.parallel.expert import MixtureOfExperts

    layer = getmodule(MixtureOfExperts)
    layer.ScaledGradient = _Changed(layer.ScaledGradient, apply=lambda tensor, factor: tensor)
