"""torch's pipeline schedules: their actions, and the runtime that carries them out with sends and receives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from lockstep.torch_internals.autograd import FunctionContext
from lockstep.torch_internals.versions import expect, probed

Action: Any = schedules._Action
"""Relies on: a tuple (stage_index, computation_type, microbatch_index)."""
Kind: Any = schedules._ComputationType
"""Relies on: FORWARD, FULL_BACKWARD, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD."""


class ScheduleRuntime(schedules._PipelineScheduleRuntime):
    """Carries out lists of actions that are given to it, of stages whose shapes are known.

    Relies on: ``_prepare_schedule_with_comms`` adds sends and receives to an order of forwards and backwards, which
    ``_step_microbatches`` carries out; both use ``pipeline_order_with_comms``, ``_internal_losses`` has the losses of
    the micro-batches, and ``_initialize_stages`` is called at the beginning.
    """

    def __init__(self, stages: Sequence[object], micro_batches: int, loss_fn: Callable[..., object]) -> None:
        super().__init__(list(stages), micro_batches, loss_fn=loss_fn, scale_grads=False)
        wait_for_gradients = getattr(Kind, "WAIT_REDUCE_GRAD", None)
        if wait_for_gradients is not None:
            self.register_custom_function(wait_for_gradients, self._wait_for_gradients)

    @property
    def own_stages(self) -> list[Any]:
        """This rank's."""
        return list(self._stages)

    def with_communication(self, order: dict[int, list[Any]]) -> list[Any]:
        """This rank's actions with sends and receives; ``order``: rank -> forwards and backwards of all stages."""
        self.pipeline_order = order
        self._prepare_schedule_with_comms(order)
        return list(self.pipeline_order_with_comms[self.rank])

    def expect_backward(self, expected: bool) -> None:
        """Whether forwards keep what backwards need."""
        self._has_backward = expected
        for stage in self._stages:
            stage.has_backward = expected

    def carry_out(self, actions: list[Any], losses: Sequence[torch.Tensor] | None = None) -> None:
        """``losses``: those that backwards begin with, where the last stage is."""
        if losses is not None:
            self._internal_losses = list(losses)
        self.pipeline_order_with_comms = {self.rank: actions}
        self._step_microbatches(target_mbs=[None] * self._n_microbatches, return_outputs=False)

    def _wait_for_gradients(self, action: Any, ctx: FunctionContext) -> None:
        """As torch's, which also ends the stage's manual finalization; that cannot be changed inside of a backward,
        from which this may be called, and every forward sets it anew.

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
        if static is None:  # torch 2.11 does not vote
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


def complete(actions: list[Any]) -> list[Any]:
    """One phase of a schedule with what belongs to it: around each stage's own actions its sharded parameters are
    gathered and given back, after its last backward gradients are reduced, and at the end sends are waited for.

    Relies on: from 2.15 on WAIT_SEND_F and WAIT_SEND_B of the same stage and micro-batch must follow each send, and
    WAIT_REDUCE_GRAD each REDUCE_GRAD; before, the runtime waits by itself.
    """
    computations = (Kind.FORWARD, Kind.FULL_BACKWARD)
    computing = [a.stage_index for a in actions if a.computation_type in computations]
    last = {stage: len(computing) - computing[::-1].index(stage) for stage in computing}
    waits = {getattr(Kind, name): getattr(Kind, f"WAIT_{name}", None) for name in ("SEND_F", "SEND_B")}
    wait_for_gradients = getattr(Kind, "WAIT_REDUCE_GRAD", None)
    result: list[object] = []
    sent: list[object] = []
    seen: set[int] = set()
    count = 0
    for action in actions:
        computes = action.computation_type in computations
        stage = action.stage_index
        if computes and stage not in seen:
            seen.add(stage)
            result.append(Action(stage, Kind.UNSHARD, None))
        result.append(action)
        if waits.get(action.computation_type) is not None:
            sent.append(Action(stage, waits[action.computation_type], action.microbatch_index))
        if computes:
            count += 1
            if count == last[stage]:
                if action.computation_type == Kind.FULL_BACKWARD:
                    result.append(Action(stage, Kind.REDUCE_GRAD, None))
                    if wait_for_gradients is not None:
                        result.append(Action(stage, wait_for_gradients, None))
                result.append(Action(stage, Kind.RESHARD, None))
    return result + sent


@probed("pipelining", "orders and carries out schedules")
def probe() -> None:
    """Put sends and receives around two stages on two ranks, on paper; and look at what is called."""
    one = Action(0, Kind.FORWARD, 1)
    expect(one[:3] == (0, Kind.FORWARD, 1), "the parts of an action")
    expect(
        (one.stage_index, one.computation_type, one.microbatch_index) == (0, Kind.FORWARD, 1), "their names"
    )
    for name in (
        "FULL_BACKWARD",
        "SEND_F",
        "RECV_F",
        "SEND_B",
        "RECV_B",
        "UNSHARD",
        "RESHARD",
        "REDUCE_GRAD",
    ):
        expect(hasattr(Kind, name), f"the kind of action {name}")
    _probe_communication()
    runtime = schedules._PipelineScheduleRuntime
    for method, arguments in (
        ("_step_microbatches", {"target_mbs", "return_outputs"}),
        ("_initialize_stages", {"args", "kwargs"}),
    ):
        given = inspect.signature(getattr(runtime, method)).parameters
        expect(arguments <= set(given), f"the arguments of {method}")
    expect("_internal_losses" in _names_in(schedules), "the losses of micro-batches")
    expect("_stages_forward_initialized" in _names_in(schedules), "what was prepared already")


def _probe_communication() -> None:
    """Two stages on two ranks, forwards before backwards: between them go one activation and one gradient."""
    orders: dict[int, list[Any]] = {
        rank: [Action(rank, kind, 0) for kind in (Kind.FORWARD, Kind.FULL_BACKWARD)] for rank in (0, 1)
    }
    found = schedules._add_send_recv(orders, stage_to_rank=lambda stage: stage, num_stages=2)
    kinds = {
        rank: [a.computation_type.name for a in actions if not a.computation_type.name.startswith("WAIT")]
        for rank, actions in found.items()
    }
    expect(kinds[0] == ["FORWARD", "SEND_F", "RECV_B", "FULL_BACKWARD"], "what the first stage sends")
    expect(kinds[1] == ["RECV_F", "FORWARD", "FULL_BACKWARD", "SEND_B"], "what the last stage sends")
    validate = getattr(schedules, "_validate_send_waits", None)
    waits = {name for name in Kind.__members__ if name.startswith("WAIT")}
    expect(waits in (set(), {"WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"}), "what is waited for")
    expect((validate is not None) == bool(waits), "waiting for what was sent")
    if validate is not None:
        validate(
            {
                rank: complete([a for a in found[rank] if "WAIT" not in a.computation_type.name])
                for rank in found
            }
        )


def _names_in(module: Any) -> set[str]:
    """Attributes that the methods of the runtime and of what it inherits from look up."""
    found: set[str] = set()
    for kind in module._PipelineScheduleRuntime.__mro__[:-1]:
        for function in vars(kind).values():
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            found.update(code.co_names if code is not None else ())
    return found
