"""torch's schedules, and one that runs all forwards now and all backwards later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torch_schedules

from lockstep.config.enums import Schedule
from lockstep.parallel.pipeline.stage import Stage

_CLASSES = {
    Schedule.GPIPE: "ScheduleGPipe",
    Schedule.ONE_F_ONE_B: "Schedule1F1B",
    Schedule.INTERLEAVED: "ScheduleInterleaved1F1B",
    Schedule.ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
    Schedule.ZBV: "ScheduleZBVZeroBubble",
    Schedule.DUALPIPEV: "ScheduleDualPipeV",
}
_ONE_STAGE = (Schedule.GPIPE, Schedule.ONE_F_ONE_B)


def torch_schedule(schedule: Schedule, stages: list[Stage], micro_batches: int) -> Any:
    """torch's object of that name. The loss is what the last stage returns, whole: it is not scaled."""
    kind = getattr(torch_schedules, _CLASSES[schedule])
    held: Any = stages[0] if schedule in _ONE_STAGE else stages
    return kind(held, micro_batches, loss_fn=lambda output, _: output, scale_grads=False)


def run(schedule: Any, micro_batches: int) -> list[torch.Tensor]:
    """Forward and backward of all micro-batches; the losses, where the last stage is."""
    losses: list[torch.Tensor] = []
    schedule.step(target=torch.zeros(micro_batches), losses=losses, return_outputs=False)
    return losses


class FillDrain(torch_schedules._PipelineScheduleRuntime):  # private; runs actions with sends and receives
    """All forwards, stage after stage; then, when it is asked to, all backwards (GPipe's order).

    ``keep``: whether there will be a backward.
    """

    def __init__(
        self, stages: list[Stage], ranks: Callable[[int], int], micro_batches: int, keep: bool
    ) -> None:
        super().__init__(stages, micro_batches, loss_fn=lambda output, _: output, scale_grads=False)
        action, kinds = torch_schedules._Action, torch_schedules._ComputationType
        every = range(stages[0].num_stages)
        order: dict[int, list[Any]] = {rank: [] for rank in range(stages[0].group_size)}
        for kind, direction in ((kinds.FORWARD, every), (kinds.FULL_BACKWARD, reversed(every))):
            for stage in direction:
                order[ranks(stage)] += [action(stage, kind, index) for index in range(micro_batches)]
        self.pipeline_order = order
        self._prepare_schedule_with_comms(order)
        actions = self.pipeline_order_with_comms[self.rank]
        # Nothing of a backward comes before the last forward anywhere, because the last stage's needs them all.
        forward = (kinds.FORWARD, kinds.RECV_F, kinds.SEND_F)
        backward = (kinds.FULL_BACKWARD, kinds.RECV_B, kinds.SEND_B)
        self._fill = _with_parameters([a for a in actions if a.computation_type in forward])
        self._drain = _with_parameters([a for a in actions if a.computation_type in backward])
        self._has_backward = keep
        for one in stages:
            one.has_backward = keep

    def fill(self) -> None:
        """All forwards."""
        for stage in self._stages:
            stage.clear_runtime_states()
        self._run(self._fill)

    def drain(self, losses: Sequence[torch.Tensor]) -> None:
        """All backwards; ``losses``: of the micro-batches, where the last stage is."""
        self._internal_losses = list(losses)
        self._run(self._drain)

    def _run(self, actions: list[Any]) -> None:
        self.pipeline_order_with_comms = {self.rank: actions}
        self._step_microbatches(target_mbs=[None] * self._n_microbatches, return_outputs=False)

    def _initialize_stages(self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Any = None) -> None:
        if self._stages_forward_initialized:
            return
        static = getattr(torch_schedules, "InferenceMode", None)
        if static is None:  # torch 2.11: shapes are known, so that it sends nothing but a first greeting
            super()._initialize_stages(args, kwargs, target)
            return
        # torch would vote on whether shapes are known, one message from each stage to the next, at each forward.
        stages: Any = self._stages
        for stage in stages:
            stage._inference_mode = static.STATIC
            stage._prepare_forward_infra(self._n_microbatches, (), {}, has_backward=self._has_backward)
            if self._has_backward:
                stage._prepare_backward_infra(self._n_microbatches)
        self._stages_forward_initialized = True


def _with_parameters(actions: list[Any]) -> list[Any]:
    """``actions`` with those around each stage's own by which sharded parameters are gathered and given back."""
    kinds = torch_schedules._ComputationType
    computing = [a.stage_index for a in actions if a.computation_type in (kinds.FORWARD, kinds.FULL_BACKWARD)]
    last = {stage: len(computing) - computing[::-1].index(stage) for stage in computing}
    result: list[Any] = []
    seen: set[int] = set()
    count = 0
    for action in actions:
        computes = action.computation_type in (kinds.FORWARD, kinds.FULL_BACKWARD)
        stage = action.stage_index
        if computes and stage not in seen:
            seen.add(stage)
            result.append(torch_schedules._Action(stage, kinds.UNSHARD, None))
        result.append(action)
        if computes:
            count += 1
            if count == last[stage]:
                if action.computation_type == kinds.FULL_BACKWARD:
                    result.append(torch_schedules._Action(stage, kinds.REDUCE_GRAD, None))
                result.append(torch_schedules._Action(stage, kinds.RESHARD, None))
    return result
