"""Where the state of a run rests outside of the device: which threads bring it, and who waits for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.config.parallel import Parallel
from lockstep.errors import OffloadError
from lockstep.model.blocks import find_blocks
from lockstep.offload.weights.attach import RemovableHandles, listen, stop_streaming, stream_weights
from lockstep.offload.weights.groups import WeightGroup, find_weight_groups
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.zero.sharding import Sharding, name_of_shard
from lockstep.torch_internals import fsdp2

if TYPE_CHECKING:
    from lockstep.offload.optimizer.gradients import GradientFile
    from lockstep.offload.optimizer.offloaded import OffloadedStep


class OffloadManager:
    """Owner of what ``offload=`` of one ``Accelerator`` needs.

    It is a ``GroupListener`` of all prepared models: a group waits here for the step that is still to change it.
    """

    def __init__(self, parallel: Parallel, device: torch.device, communicator: Communicator) -> None:
        self._parallel = parallel
        self._device = device
        self._communicator = communicator
        # Under tp, pp and cp (with ZeRO, in host memory) torch's engine alone moves shards.
        self._is_on = not parallel.splits_model
        self._groups: list[WeightGroup] = []
        self._prefetched: dict[WeightGroup, WeightGroup] = {}
        self._streamed: list[nn.Module] = []
        self._handles: list[RemovableHandles] = []
        self._steps: dict[Optimizer, OffloadedStep] = {}
        self._gradients: list[GradientFile] = []

    def check_budget(self, model: nn.Module, ranks: int) -> None:
        """Raise OffloadError, before anything is moved, if the budget is below a block, or its shard on ``ranks``."""
        budget = self._parallel.offload_budget
        if not budget:
            return
        groups = find_weight_groups(model, find_blocks(model, self._parallel.blocks), self._wanted(model))
        largest = max(groups, key=lambda group: group.nbytes, default=None)
        if largest is not None and largest.nbytes > budget * ranks:
            needed = -(-largest.nbytes // ranks)
            raise OffloadError(
                f"offload_budget={budget} bytes is less than '{largest.name}' needs, {needed} bytes. Give at "
                "least that, or better three times as much, so that reading overlaps with computing."
            )

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are kept in files."""
        return bool(self._gradients)

    def add_model(self, prepared: ParallelModel) -> None:
        """Bring this model's parameters before they are used, if they rest elsewhere; note its groups. Collective."""
        if not self._is_on:
            return
        model, sharding = prepared.plain, prepared.sharding
        groups = (
            find_weight_groups(model, find_blocks(model, self._parallel.blocks), self._wanted(model))
            if sharding is None
            else _sharded_groups(model, sharding)
        )
        folder = self._parallel.params_folder
        with raise_on_all_ranks(self._communicator):
            if self._streams(sharding):
                budget = self._parallel.offload_budget or None
                stream_weights(model, groups, self._device, budget, listeners=[self], ready=self.ready)
                self._streamed.append(model)
            else:
                self._handles.append(listen(model, groups, [self]))
            if folder is not None:
                from lockstep.offload.optimizer.gradients import GradientFile

                tensors = (tensor for group in groups for tensor in group.tensors.values())
                self._gradients.append(GradientFile(tensors, folder))
        self._groups += groups
        if self._parallel.forward_prefetch:
            self._prefetched.update(itertools.pairwise(groups))

    def _streams(self, sharding: Sharding | None) -> bool:
        """Return whether parameters are brought here, not by torch's engine, and not used where they are."""
        if self._parallel.params_folder is not None:
            return True
        return self._parallel.offloads_params and sharding is None and self._device.type != "cpu"

    def _wanted(self, model: nn.Module) -> Callable[[str], bool]:
        """Return which tensors are in groups: buffers too, where all of a model comes to another device to compute."""
        if self._device.type != "cpu":
            return lambda name: True
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return lambda name: name in parameters

    def take_over(self, optimizer: Optimizer) -> None:
        """Let an optimizer's steps run block by block, from its first one on. Collective."""
        if not self._is_on or optimizer in self._steps:
            return
        from lockstep.offload.optimizer.attach import offload_step

        devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        folder = self._parallel.state_folder
        # A disk may be full on one rank alone; everything else is the same on all.
        with nullcontext() if folder is None else raise_on_all_ranks(self._communicator):
            self._steps[optimizer] = offload_step(
                optimizer,
                self._groups,
                folder=folder,
                device=self._device if self._device in devices else torch.device("cpu"),
            )

    # What groups tell -----------------------------------------------------------------------------------

    def forward_begins(self, group: WeightGroup) -> None:
        for step in self._steps.values():
            step.forward_begins(group)
            if group in self._prefetched:  # torch gathers it in this group's forward
                step.forward_begins(self._prefetched[group])

    def forward_ended(self, group: WeightGroup) -> None:
        for step in self._steps.values():
            step.forward_ended(group)

    def backward_begins(self, group: WeightGroup) -> None:
        for step in self._steps.values():
            step.backward_begins(group)

    def ready(self, group: WeightGroup) -> None:
        """Wait, in the thread that loads, until no step will change this group elsewhere than in its pages."""
        for step in self._steps.values():
            if self._device.type == "cpu":
                step.ready_in_place(group)
            else:
                step.ready(group)

    # -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for all steps. Raises what went wrong in them."""
        for step in self._steps.values():
            step.finish()

    def clear(self) -> None:
        """Finish, and leave plain models and optimizers."""
        for step in self._steps.values():
            step.close()
        for model in self._streamed:
            stop_streaming(model)
        for file in self._gradients:
            file.close()
        for handles in self._handles:
            handles.remove()
        for kept in (
            self._steps,
            self._streamed,
            self._handles,
            self._gradients,
            self._groups,
            self._prefetched,
        ):
            kept.clear()


def _sharded_groups(model: nn.Module, sharding: Sharding) -> list[WeightGroup]:
    """Return one for each group of parameters that torch gathers together, with this rank's shards."""
    labels = {id(module): label for label, module in model.named_modules()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for module in sharding.modules:
        shards = {
            name_of_shard(record, names): fsdp2.sharded_param(record)
            for group in fsdp2.param_groups(module)
            for record in fsdp2.params(group)
        }
        nbytes = sum(shard.to_local().nbytes for shard in shards.values())
        groups.append(WeightGroup(labels[id(module)], [module], dict(shards), nbytes))
    return groups
