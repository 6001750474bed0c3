"""The stages of this rank: what they hold, what ranks hold together, and how results leave the last one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import UsageError
from lockstep.parallel.pipeline.gradients import GradientAccumulator
from lockstep.parallel.pipeline.layout import Layout
from lockstep.parallel.pipeline.micro_batch import Joined
from lockstep.parallel.pipeline.options import SPLIT_BACKWARD, PipelineOptions, rank_of_stage
from lockstep.parallel.pipeline.plan import PipelinePlan
from lockstep.parallel.pipeline.stage import Executed, Stage, StageModule
from lockstep.parallel.pipeline.stage_forward import Pass
from lockstep.parallel.pipeline.state import ForwardState
from lockstep.parallel.pipeline.traced import TensorMeta

RankValue = TypeVar("RankValue")


class LocalStages:
    """This rank's part of a pipeline over ``group``."""

    def __init__(
        self,
        title: str,
        layout: Layout,
        group: dist.ProcessGroup,
        options: PipelineOptions,
        device: torch.device,
    ) -> None:
        """Take the model's layout; ``title``: the name of the model's class."""
        self.title = title
        self.layout = layout
        self.group = group
        self.device = device
        self.ranks = group.size()
        self.schedule = options.schedule
        self.count = len(layout.starts)
        self.indices = [stage for stage in range(self.count) if self.rank_of(stage) == group.rank()]
        self.modules: dict[int, StageModule] = {}
        self.tied: dict[str, list[int]] = {}
        self.uses: Mapping[str, set[int]] = {}
        self.gradient_accumulator = GradientAccumulator({})
        # Whether gradients of tied parameters are summed over the ranks that hold them, in each backward.
        self.sums = True
        self.executed: list[Executed] = []
        self.state = ForwardState(self.gather_from_ranks)
        self.named_modules: Callable[[], list[tuple[str, nn.Module]]] = list
        self._last_rank = dist.get_global_rank(group, self.rank_of(self.count - 1))

    @property
    def settled(self) -> bool:
        """Whether parameters outside of blocks have been given to the stages that use them."""
        return bool(self.modules)

    def rank_of(self, stage: int) -> int:
        """Return the rank, within the group, that holds ``stage``."""
        return rank_of_stage(self.schedule, stage, self.ranks)

    def place_parameters(self, uses: Mapping[str, set[int]], callbacks: list[Callable[[], None]]) -> None:
        """Keep, at the first forward, those parameters outside of blocks that this rank's stages use.

        Raises:
            UsageError: a later forward uses others.
        """
        if self.settled:
            self._check_known(uses)
            return
        self.uses = uses
        self.layout.place(uses)
        self.layout.drop_parts(set(self.indices))
        for stage in self.indices:
            self.modules[stage] = StageModule(self.layout.modules_of(stage), self.layout.parameters_of(stage))
        for name, stages in sorted(self.layout.holders().items()):
            # Sorted names give all ranks the same order of groups and of all-reduces.
            ranks = sorted({self.rank_of(stage) for stage in stages})
            if len(ranks) > 1:
                self.tied[name] = ranks
        for callback in callbacks:
            callback()
        if self.schedule in SPLIT_BACKWARD:
            # torch looks for the weights of a stage when the input's backward begins: they must be gathered then.
            for module in self._sharded():
                module.set_reshard_after_forward(False, recurse=False)
        self.gradient_accumulator = GradientAccumulator(self._tied_groups())

    def _check_known(self, uses: Mapping[str, set[int]]) -> None:
        holders = self.layout.holders()
        for name, stages in uses.items():
            if stages - holders[name]:
                raise UsageError(
                    f"The parameter '{name}' is used by stage {min(stages - holders[name])} of the pipeline, but "
                    "that stage did not use it in the first forward, so it does not have it. Let the first "
                    "forward use the same parameters as later forwards."
                )

    def _tied_groups(self) -> dict[str, dist.ProcessGroup]:
        # Weights that the same ranks tie share one group.
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(self.ranks)): self.group}
        found: dict[str, dist.ProcessGroup] = {}
        for name, ranks in self.tied.items():
            if self.group.rank() not in ranks:
                continue
            if tuple(ranks) not in groups:
                members = [dist.get_global_rank(self.group, rank) for rank in ranks]
                # The ranks of the group alone make it: others have no such parameter, and do not come here.
                groups[tuple(ranks)] = dist.new_group(members, use_local_synchronization=True)
            found[name] = groups[tuple(ranks)]
        return found

    def torch_stages(self, plan: PipelinePlan, results: int) -> list[Stage]:
        """Return new records of torch's; ``results``: how many tensors the last stage returns."""
        return [
            Stage(module, stage, plan.traced.cuts, self.device, self.group, self.executed, results)
            for stage, module in self.modules.items()
        ]

    def begin(self, plan: PipelinePlan, once: Pass, find: bool = False) -> Pass:
        """Begin forwards and backwards of this batch; ``find``: what they change is to be found."""
        once.state = self.state
        self.state.begin_batch(self.named_modules() if find or self.state.is_used else (), find)
        for stage, module in self.modules.items():
            module.segment = plan.segments[stage]
            module.segment.now = once
        return once

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's, sharded ones as shards."""
        for module in self._sharded():
            module.reshard()
        return list(
            dict.fromkeys(p for module in self.modules.values() for p in nn.Module.parameters(module))
        )

    def _sharded(self) -> list[FSDPModule]:
        found = (inner for module in self.modules.values() for inner in module.modules())
        return [module for module in found if isinstance(module, FSDPModule)]

    def gather_from_ranks(self, mine: RankValue) -> list[RankValue]:
        """Return what each rank says, in the order of the last stages that they hold. Collective."""
        gathered = [mine] * self.ranks
        dist.all_gather_object(gathered, mine, group=self.group)
        last = {self.rank_of(stage): stage for stage in range(self.count)}
        # A rank with several stages counts by the last of them.
        return [gathered[rank] for rank in sorted(last, key=last.__getitem__)]

    def any_rank(self, flag: bool) -> bool:
        """Return whether it is set on any rank. Waits for the device."""
        gathered = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(gathered, dist.ReduceOp.MAX, group=self.group)
        return bool(gathered)

    def from_last(self, value: Tensor | None, like: Joined | TensorMeta) -> Tensor:
        """Return the tensor of the rank with the last stage, of the shape of ``like``, on all ranks."""
        if value is None:
            value = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        elif value.shape != like.shape:
            raise UsageError(
                f"The model returned a tensor of shape {tuple(value.shape)} but its first forward returned shape "
                f"{tuple(like.shape)}. Return tensors whose shape does not depend on values."
            )
        # Weights may have been gathered in 16 bits.
        value = value.detach().to(like.dtype).contiguous()
        dist.broadcast(value, self._last_rank, group=self.group)
        return value
