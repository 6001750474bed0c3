"""Stages and the order in which they work: the modules of a stage, torch's record of it, and torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from lockstep.config.enums import Schedule
from lockstep.errors import LockstepError
from lockstep.parallel.pipeline.stage_forward import StageForward
from lockstep.parallel.pipeline.traced import Cut, TensorMeta
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import pipelining
from lockstep.torch_internals.pipelining import StageBase

Executed = tuple[int, int, str, int]
"""(rank, stage, kind, micro-batch); kinds ``F``, ``B``, ``I``, ``W``."""


class StageModule(nn.Module):
    """The blocks and other modules of one stage, under their names in the user's model.

    The forward runs the user's model on this stage; whoever shards this module shards the stage. ``micro_batch`` is the
    one whose forward is running, None outside of one.
    """

    def __init__(self, modules: Mapping[str, nn.Module], parameters: Mapping[str, dict[str, object]]) -> None:
        """Take ``parameters``: name of a module that belongs to no stage as a whole -> its own parameters."""
        super().__init__()
        self.segment: StageForward | None = None
        self.micro_batch: int | None = None
        for name, registered in parameters.items():
            # The same dict: whoever replaces one replaces it in the model.
            torch_modules.set_parameters_of(self._module_at(name), registered)
        for name, module in modules.items():
            path, _, key = name.rpartition(".")
            self._module_at(path).add_module(key, module)

    def _module_at(self, name: str) -> nn.Module:
        module: nn.Module = self
        for key in name.split(".") if name else ():
            if key not in torch_modules.children_of(module):
                module.add_module(key, nn.Module())
            module = torch_modules.children_of(module)[key]
        return module

    def forward(self, *received: torch.Tensor) -> object:
        assert self.segment is not None
        assert self.micro_batch is not None
        return self.segment(self.micro_batch, received)


class Stage(StageBase):
    """torch's stage, with static shapes, which notes what it did."""

    def __init__(
        self,
        module: StageModule,
        index: int,
        cuts: list[Cut],
        device: torch.device,
        group: dist.ProcessGroup,
        executed: list[Executed],
        results: int,
    ) -> None:
        """Take ``cuts[s]``: what stage s receives; ``results``: how many tensors the last stage's forward returns."""
        # torch wants an example of everything that is sent or returned, to allocate receive buffers once.
        # Nobody looks at what the last stage returns.
        number = TensorMeta(torch.Size(), torch.float32, False)
        following = cuts[index + 1].kinds if index + 1 < len(cuts) else (number,) * results
        super().__init__(
            module,
            index,
            len(cuts),
            device,
            input_args=tuple(map(_example, cuts[index].kinds)),
            output_args=tuple(map(_example, following)),
            group=group,
        )
        self._module = module
        self._executed = executed

    def _note_action(self, kind: str, micro_batch: int) -> None:
        self._executed.append((self.group_rank, self.stage_index, kind, micro_batch))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: object, **kwargs: object) -> object:
        self._note_action("F", fwd_chunk_id)
        self._module.micro_batch = fwd_chunk_id
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, LockstepError):
                # torch wraps what a forward raises.
                raise error.__cause__ from None
            raise
        finally:
            self._module.micro_batch = None

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._note_action("B" if full_backward else "I", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: object, **kwargs: object) -> None:
        self._note_action("W", bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def _example(kind: TensorMeta) -> torch.Tensor:
    return torch.empty(kind.shape, dtype=kind.dtype, device="meta", requires_grad=kind.requires_grad)


_CLASSES = {
    Schedule.GPIPE: "ScheduleGPipe",
    Schedule.ONE_F_ONE_B: "Schedule1F1B",
    Schedule.INTERLEAVED: "ScheduleInterleaved1F1B",
    Schedule.ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
    Schedule.ZBV: "ScheduleZBVZeroBubble",
    Schedule.DUALPIPEV: "ScheduleDualPipeV",
}
_ONE_STAGE = (Schedule.GPIPE, Schedule.ONE_F_ONE_B)


def torch_schedule(schedule: Schedule, stages: list[Stage], micro_batches: int) -> object:
    """Return torch's schedule of that name. The loss is what the last stage returns, whole: it is not scaled."""
    kind = getattr(torch_schedules, _CLASSES[schedule])
    local_stages: object = stages[0] if schedule in _ONE_STAGE else stages
    return kind(local_stages, micro_batches, loss_fn=lambda output, _: output, scale_grads=False)


def run(schedule: Any, micro_batches: int) -> list[torch.Tensor]:
    """Forward and backward of all micro-batches; the losses, where the last stage is."""
    losses: list[torch.Tensor] = []
    schedule.step(target=torch.zeros(micro_batches), losses=losses, return_outputs=False)
    return losses


class FillDrain(pipelining.ScheduleRuntime):
    """All forwards, stage after stage; then, when it is asked to, all backwards (GPipe's order).

    ``keep``: whether there will be a backward.
    """

    def __init__(
        self, stages: list[Stage], ranks: Callable[[int], int], micro_batches: int, keep: bool
    ) -> None:
        super().__init__(stages, micro_batches, loss_fn=lambda output, _: output)
        action, kinds = pipelining.ScheduleAction, pipelining.ComputationType
        every = range(stages[0].num_stages)
        order: dict[int, list[pipelining.ScheduleAction | None]] = {
            rank: [] for rank in range(stages[0].group_size)
        }
        for kind, direction in ((kinds.FORWARD, every), (kinds.FULL_BACKWARD, reversed(every))):
            # Forwards from the first stage on, backwards from the last: each rank gets those of its own stages, in this
            # order.
            for stage in direction:
                order[ranks(stage)] += [action(stage, kind, index) for index in range(micro_batches)]
        actions = self.with_communication(order)
        # Nothing of a backward comes before the last forward anywhere, because the last stage's needs them all.
        forward = (kinds.FORWARD, kinds.RECV_F, kinds.SEND_F)
        backward = (kinds.FULL_BACKWARD, kinds.RECV_B, kinds.SEND_B)
        self._fill = pipelining.complete([a for a in actions if a.computation_type in forward])
        self._drain = pipelining.complete([a for a in actions if a.computation_type in backward])
        self.expect_backward(keep)

    def fill(self) -> None:
        """Run all forwards."""
        for stage in self.own_stages:
            stage.clear_runtime_states()
        self.carry_out(self._fill)

    def drain(self, losses: Sequence[torch.Tensor]) -> None:
        """Run all backwards; ``losses``: of the micro-batches, where the last stage is."""
        self.carry_out(self._drain, losses)
