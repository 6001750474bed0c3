"""torch's pipelines: the actions of a schedule, the runtime that carries them out with sends and receives, and stages.

Up to torch 2.12 a stage gets what later versions do between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import stage as stages

from lockstep.torch_internals.autograd import FunctionContext
from lockstep.torch_internals.versions import expect, probed

ScheduleAction = schedules._Action
"""Relies on: a tuple (stage_index, computation_type, microbatch_index)."""
ComputationType = schedules._ComputationType
"""Relies on: FORWARD, FULL_BACKWARD, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD."""


class ScheduleRuntime(schedules._PipelineScheduleRuntime):
    """Carries out lists of actions that are given to it, of stages whose shapes are known.

    Relies on: ``_prepare_schedule_with_comms`` adds sends and receives to an order of forwards and backwards, which
    ``_step_microbatches`` carries out; both use ``pipeline_order_with_comms``, ``_internal_losses`` has the losses of
    the micro-batches, and ``_initialize_stages`` is called at the beginning.
    """

    def __init__(self, stages: Sequence[object], micro_batches: int, loss_fn: Callable[..., object]) -> None:
        super().__init__(list(stages), micro_batches, loss_fn=loss_fn, scale_grads=False)
        wait_for_gradients = getattr(ComputationType, "WAIT_REDUCE_GRAD", None)
        if wait_for_gradients is not None:
            self.register_custom_function(wait_for_gradients, self._wait_for_gradients)

    @property
    def own_stages(self) -> list[Any]:
        """This rank's."""
        return list(self._stages)

    def with_communication(self, order: dict[int, list[ScheduleAction | None]]) -> list[ScheduleAction]:
        """Return this rank's actions with sends and receives; ``order``: rank -> forwards and backwards."""
        self.pipeline_order = order
        self._prepare_schedule_with_comms(order)
        return list(self.pipeline_order_with_comms[self.rank])

    def expect_backward(self, expected: bool) -> None:
        """Say whether forwards keep what backwards need."""
        self._has_backward = expected
        for stage in self._stages:
            stage.has_backward = expected

    def carry_out(self, actions: list[ScheduleAction], losses: Sequence[torch.Tensor] | None = None) -> None:
        """Carry out the schedule; ``losses``: those that backwards begin with, where the last stage is."""
        if losses is not None:
            self._internal_losses = list(losses)
        self.pipeline_order_with_comms = {self.rank: actions}
        self._step_microbatches(target_mbs=[None] * self._n_microbatches, return_outputs=False)

    def _wait_for_gradients(self, action: ScheduleAction, ctx: FunctionContext) -> None:
        """Wait as torch does, and leave the stage's manual finalization as it is: it cannot be changed inside of a
        backward, from which this may be called, and every forward sets it anew.

        Relies on: ``_gradient_reduction_handle``, set by REDUCE_GRAD of a sharded stage, from 2.15 on.
        """
        for stage in self.own_stages:
            handle = stage._gradient_reduction_handle
            if stage.stage_index == action.stage_index and handle is not None:
                handle.wait()
                stage._gradient_reduction_handle = None

    def _initialize_stages(
        self, args: Any, kwargs: object, target: object = None, loss_kwargs: object = None
    ) -> None:
        if self._stages_forward_initialized:
            return
        static = getattr(schedules, "InferenceMode", None)
        # torch 2.11 does not vote.
        if static is None:
            super()._initialize_stages(args, kwargs)
            return
        # torch would vote on whether shapes are known, one message from each stage to the next, at each forward.
        stages: Any = self._stages
        for stage in stages:
            stage._inference_mode = static.STATIC
            stage._prepare_forward_infra(self._n_microbatches, (), {}, has_backward=self._has_backward)
            if self._has_backward:
                stage._prepare_backward_infra(self._n_microbatches)
        self._stages_forward_initialized = True


def without_setup(schedule: Any) -> None:
    """Let a schedule of one stage on each rank call its stage without preparing messages between ranks.

    Relies on: ``_initialize_stage``, which the loop calls before the first micro-batch.
    """
    expect(callable(schedule._initialize_stage), "a schedule prepares its stage in _initialize_stage")
    schedule._initialize_stage = lambda *_, **__: None


def complete(actions: list[ScheduleAction]) -> list[ScheduleAction]:
    """Complete a phase of a schedule with what belongs to it: around each stage's own actions its sharded parameters
    are gathered and given back, after its last backward gradients are reduced, and at the end sends are waited for.

    Relies on: from 2.15 on WAIT_SEND_F and WAIT_SEND_B of the same stage and micro-batch must follow each send, and
    WAIT_REDUCE_GRAD each REDUCE_GRAD; before, the runtime waits by itself.
    """
    computations = (ComputationType.FORWARD, ComputationType.FULL_BACKWARD)
    computing = [a.stage_index for a in actions if a.computation_type in computations]
    # By stage, how many computations of all stages there are up to its last one.
    last = {stage: len(computing) - computing[::-1].index(stage) for stage in computing}
    waits: dict[ComputationType, Any] = {
        getattr(ComputationType, name): getattr(ComputationType, f"WAIT_{name}", None)
        for name in ("SEND_F", "SEND_B")
    }
    wait_for_gradients = getattr(ComputationType, "WAIT_REDUCE_GRAD", None)
    result: list[ScheduleAction] = []
    sent: list[ScheduleAction] = []
    seen: set[int] = set()
    count = 0
    for action in actions:
        computes = action.computation_type in computations
        stage = action.stage_index
        if computes and stage not in seen:
            seen.add(stage)
            result.append(ScheduleAction(stage, ComputationType.UNSHARD, None))
        result.append(action)
        if waits.get(action.computation_type) is not None:
            sent.append(ScheduleAction(stage, waits[action.computation_type], action.microbatch_index))
        if computes:
            count += 1
            if count == last[stage]:
                # A phase of forwards alone has no gradients to reduce.
                if action.computation_type == ComputationType.FULL_BACKWARD:
                    result.append(ScheduleAction(stage, ComputationType.REDUCE_GRAD, None))
                    if wait_for_gradients is not None:
                        result.append(ScheduleAction(stage, wait_for_gradients, None))
                result.append(ScheduleAction(stage, ComputationType.RESHARD, None))
    return result + sent


@probed("pipelining", "orders and carries out schedules")
def probe() -> None:
    """Put sends and receives around two stages on two ranks, on paper: one activation and one gradient go between."""
    orders: dict[int, list[ScheduleAction]] = {
        rank: [
            ScheduleAction(rank, kind, 0) for kind in (ComputationType.FORWARD, ComputationType.FULL_BACKWARD)
        ]
        for rank in (0, 1)
    }
    found = schedules._add_send_recv(orders, stage_to_rank=lambda stage: stage, num_stages=2)
    kinds = {
        rank: [a.computation_type.name for a in actions if not a.computation_type.name.startswith("WAIT")]
        for rank, actions in found.items()
    }
    expect(kinds[0] == ["FORWARD", "SEND_F", "RECV_B", "FULL_BACKWARD"], "what the first stage sends")
    expect(kinds[1] == ["RECV_F", "FORWARD", "FULL_BACKWARD", "SEND_B"], "what the last stage sends")
    waits = {name for name in ComputationType.__members__ if name.startswith("WAIT")}
    expect(waits in (set(), {"WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"}), "what is waited for")


# Stages -----------------------------------------------------------------------------------------------

_TorchStage: Any = PipelineStage


class _StageUpTo212(_TorchStage):
    """A stage that sends zeros where an input has no gradient but the stage before waits for one, as from 2.13 on.

    Relies on: ``bwd_cache`` has the gradients of the inputs of a micro-batch after its backward;
    ``_create_grad_send_info`` says for each input where its gradient goes, None: nowhere.
    """

    def __init__(self, *args: object, input_args: tuple[torch.Tensor, ...], **options: object) -> None:
        super().__init__(*args, input_args=input_args, **options)
        self._examples = input_args

    def backward_one_chunk(self, bwd_chunk_id: int, *args: object, **options: object) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        if bwd_chunk_id in self.bwd_cache and not self.is_first:
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros(example.shape, dtype=example.dtype, device=self.device)
                if example.requires_grad and gradient is None
                else gradient
                for gradient, example in zip(self.bwd_cache[bwd_chunk_id], self._examples, strict=True)
            )

    def _create_grad_send_info(self, args_recv_info: object) -> list[int | None]:
        found = super()._create_grad_send_info(args_recv_info)
        return [
            to if example.requires_grad else None for to, example in zip(found, self._examples, strict=True)
        ]


class _StageOf211(_StageUpTo212):
    """A stage where only those tensors have gradients whose examples do, as from 2.12 on.

    Relies on: ``_prepare_forward_infra`` makes of the examples the records ``args_recv_info``, whose buffers all
    require gradients if ``has_backward``; ``_create_grad_recv_info`` says for each output where its gradient comes
    from; a record other than ``_RecvInfo`` is not received.
    """

    def _prepare_forward_infra(self, num_microbatches: int, args: object, kwargs: object = None) -> object:
        stage: Any = self
        wanted = stage.has_backward
        # torch would let all buffers require gradients; here those do whose examples do.
        stage.has_backward = False
        try:
            outputs = super()._prepare_forward_infra(num_microbatches, args, kwargs)
        finally:
            stage.has_backward = wanted
        for records in self.args_recv_info.values():
            for record, example in zip(records, self._examples, strict=True):
                if isinstance(record, stages._RecvInfo) and record.buffer is not None:
                    record.buffer.requires_grad_(wanted and example.requires_grad)
        return outputs

    def set_local_fwd_input(
        self, prev_stage_outputs: torch.Tensor | tuple[torch.Tensor, ...], mb_index: int
    ) -> None:
        given = (prev_stage_outputs,) if isinstance(prev_stage_outputs, torch.Tensor) else prev_stage_outputs
        for record, tensor, example in zip(self.args_recv_info[mb_index], given, self._examples, strict=True):
            # Detached: the schedule calls the backward of each stage, not autograd.
            record.buffer = tensor.detach().requires_grad_(example.requires_grad)

    def _create_grad_recv_info(self, act_send_info: object) -> object:
        found = super()._create_grad_recv_info(act_send_info)
        examples = self.get_outputs_meta()
        return tuple(
            record if example.requires_grad else None
            for record, example in zip(found, examples[: len(found)], strict=True)
        )

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> object:
        return tuple(record and record.buffer for record in self.grad_recv_info[bwd_chunk_id])

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        for record, tensor in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            if record is not None:
                record.buffer = tensor

    def _validate_fwd_outputs(self, outputs: object) -> None:
        """Return the shapes are those of a forward that was looked at; nobody receives what the last stage returns."""

    def _get_init_p2p_neighbors_ops(self) -> list[object]:
        """Return a first message in both directions is for NCCL; gloo of torch 2.11 may not be connected yet."""
        return [] if self.device.type == "cpu" else super()._get_init_p2p_neighbors_ops()


def _stage_of_this_torch() -> object:
    if hasattr(PipelineStage, "_get_grad_send_meta"):
        return PipelineStage
    return _StageUpTo212 if hasattr(schedules, "InferenceMode") else _StageOf211


StageBase: Any = _stage_of_this_torch()


def splits_backward_exactly() -> bool:
    """Return whether the backward of weights may come apart from that of inputs: up to torch 2.12 the gradient of a
    weight that is used twice is wrong then, and one whose result has two parts fails."""
    return torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
