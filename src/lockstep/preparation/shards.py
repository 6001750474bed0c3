"""The sharded models of one ``Accelerator``, and the optimizers that step on their shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.config.parallel import Parallel
from lockstep.errors import UsageError
from lockstep.parallel.sharding import Sharding, sharding_of
from lockstep.runtime.mesh import data_mesh
from lockstep.runtime.process import Runtime
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.sharded import check_optimizer, choose_implementation, replace_parameters


class Shards:
    """Knows which parameters took the places of which. Without sharding every method does nothing.

    Args:
        loss_is_scaled: Optimizers step through a loss scaler.
    """

    def __init__(self, parallel: Parallel, runtime: Runtime, loss_is_scaled: bool) -> None:
        self._parallel = parallel
        self._runtime = runtime
        self._loss_is_scaled = loss_is_scaled
        self._active = parallel.shards and runtime.world_size > 1
        self._mesh: Any = None
        self._of_models: list[Sharding] = []
        # Parameter before sharding -> the one that took its place; for optimizers that hold the former.
        self._replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def mesh(self) -> Any:
        """The mesh to shard over, made once; None where nothing is sharded."""
        if self._active and self._mesh is None:
            self._mesh = data_mesh(self._runtime, self._parallel)
        return self._mesh

    def add_model(self, model: nn.Module, optimizers: list[PreparedOptimizer]) -> None:
        """Take note of a prepared model, and give its shards to optimizers that were prepared before it."""
        sharding = sharding_of(model)
        if sharding is None:
            return
        self._of_models.append(sharding)
        self._replaced.update(sharding.take_replaced())
        for optimizer in optimizers:
            self._hand_over(optimizer.optimizer)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Give an optimizer the shards of the parameters that it holds, and drop gathered ones before it steps."""
        if not self._active:
            return
        for group in optimizer.param_groups:
            group["params"] = self.of(group["params"])
        self._hand_over(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self.reshard())

    def of(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same, but the shard of each that a sharded model has gathered, as between forward and backward."""
        gathered = {id(whole): shard for sharding in self._of_models for whole, shard in sharding.gathered()}
        return [gathered.get(id(parameter), parameter) for parameter in parameters]

    def refuse_shared_parameters(self, model: nn.Module) -> None:
        """Raise UsageError if a parameter of ``model`` belongs to a model that was sharded before."""
        names = [name for name, parameter in model.named_parameters() if parameter in self._replaced]
        if names:
            raise UsageError(
                f"{type(model).__name__} shares {len(names)} parameters ('{names[0]}', ...) with a model that was "
                "sharded before. Put both into one module and prepare that."
            )

    def reshard(self) -> None:
        """Drop gathered parameters."""
        for sharding in self._of_models:
            sharding.reshard()

    def recover(self) -> None:
        """Forget a backward that raised."""
        for sharding in self._of_models:
            sharding.recover()

    def discard_unreduced(self, optimizer: Optimizer) -> None:
        """Forget gradients of this optimizer's shards that ``zero_grad`` does not see."""
        if not self._of_models:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for sharding in self._of_models:
            sharding.discard_unreduced(parameters)

    def average_whole(self) -> None:
        """Average gradients of parameters that every rank holds whole, where averaging is not held back. Collective."""
        for sharding in self._of_models:
            sharding.average_whole()

    def clear(self) -> None:
        self._of_models.clear()
        self._replaced.clear()

    def _hand_over(self, optimizer: Optimizer) -> None:
        replace_parameters(optimizer, self._replaced)
        check_optimizer(optimizer)
        choose_implementation(optimizer, self._loss_is_scaled)
