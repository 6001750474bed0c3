"""torch's schedules, and one that runs all forwards now and all backwards later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torch_schedules

from lockstep.config.enums import Schedule
from lockstep.parallel.pipeline.stage import Stage
from lockstep.torch_internals import pipelining

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
    """torch's object of that name. The loss is what the last stage returns, whole: it is not scaled."""
    kind = getattr(torch_schedules, _CLASSES[schedule])
    held: object = stages[0] if schedule in _ONE_STAGE else stages
    return kind(held, micro_batches, loss_fn=lambda output, _: output, scale_grads=False)


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
        action, kinds = pipelining.Action, pipelining.Kind
        every = range(stages[0].num_stages)
        order: dict[int, list[Any]] = {rank: [] for rank in range(stages[0].group_size)}
        for kind, direction in ((kinds.FORWARD, every), (kinds.FULL_BACKWARD, reversed(every))):
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
        """All forwards."""
        for stage in self.own_stages:
            stage.clear_runtime_states()
        self.carry_out(self._fill)

    def drain(self, losses: Sequence[torch.Tensor]) -> None:
        """All backwards; ``losses``: of the micro-batches, where the last stage is."""
        self.carry_out(self._drain, losses)
