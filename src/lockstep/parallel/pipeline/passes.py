"""How a batch goes through the pipeline: with its backward, with a backward later, or without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.tree import leaves, map_leaves
from lockstep.parallel.pipeline.gradients import attach, attach_outputs, kept_apart, pull
from lockstep.parallel.pipeline.local import LocalStages
from lockstep.parallel.pipeline.micro_batch import Call
from lockstep.parallel.pipeline.options import PipelineOptions
from lockstep.parallel.pipeline.orders import FillDrain, run, torch_schedule
from lockstep.parallel.pipeline.plan import Plan
from lockstep.parallel.pipeline.segment import Pass
from lockstep.parallel.pipeline.trace import Kind

LossFunction = Callable[..., Tensor]
Parameters = Callable[[], Mapping[str, nn.Parameter]]


class Autocast:
    """The autocast around a call: stages enter it for their forwards, but not for their backwards."""

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self.state = (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def outside(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._type, enabled=False)

    def inside(self) -> AbstractContextManager[Any]:
        enabled, dtype = self.state
        # Casts of weights are not kept, because each micro-batch has a backward of its own.
        return torch.autocast(self._type, dtype=dtype, enabled=enabled, cache_enabled=False)


def train(
    stages: LocalStages,
    plan: Plan,
    calls: list[Call],
    loss_fn: LossFunction | None,
    options: PipelineOptions,
    autocast: Autocast,
    parameters: Parameters,
) -> Any:
    """Forward and backward of all micro-batches; gradients wait for the backward of the loss that is returned."""
    assert plan.loss is not None
    path = plan.loss
    scale = options.loss_scale() if options.loss_scale is not None else 1.0
    share = 1 / plan.micro_batches if options.loss_reduction == "mean" else 1.0
    wanted = options.outputs == "all" and loss_fn is None
    kept: list[dict[str, Tensor]] = []
    losses: list[Tensor] = []

    def finish(index: int, output: Any) -> Tensor:
        found = leaves(_with_loss(output, calls[index], loss_fn))
        losses.append(found[path].detach())
        if wanted:
            kept.append({key: leaf.detach() for key, leaf in found.items() if isinstance(leaf, Tensor)})
        loss: Tensor = found[path] * (share * scale)
        return loss

    if plan.schedule is None:
        plan.schedule = torch_schedule(options.schedule, stages.torch_stages(plan, 1), plan.micro_batches)
    stages.begin(plan, Pass(calls, finish, autocast.inside))
    with kept_apart(stages.parameters()) as gradients:
        run(plan.schedule, plan.micro_batches)
    like = Kind.of(leaves(plan.template)[path])
    value = stages.from_last(torch.stack(losses).sum(0) * share if losses else None, like)

    def add(incoming: Tensor) -> None:
        stages.deposit.add(gradients, parameters(), incoming / scale)
        gradients.clear()

    results = {path: attach(value, add)}
    if wanted:
        for key, kind in plan.outputs.items():
            if key != path:
                results[key] = stages.from_last(
                    kind.join([each[key] for each in kept]) if kept else None, kind
                )
    return _fill(plan.template, results)


def forward_now(
    stages: LocalStages, plan: Plan, calls: list[Call], autocast: Autocast, parameters: Parameters
) -> Any:
    """All forwards; the backwards run when the loop calls backward on what it makes of the outputs."""
    outputs = plan.outputs
    with_gradient = [path for path, kind in outputs.items() if kind.requires_grad]
    kept: list[dict[str, Tensor]] = []

    def finish(_: int, output: Any) -> tuple[Tensor, ...]:
        found = leaves(output)
        kept.append({path: found[path] for path in outputs})
        return tuple(found[path] for path in with_gradient)

    once = Pass(calls, finish, autocast.inside)
    # Stages of its own, because another forward may come before this one's backward.
    runner = FillDrain(
        stages.torch_stages(plan, len(with_gradient)), stages.rank_of, plan.micro_batches, keep=True
    )
    stages.begin(plan, once)
    runner.fill()
    results = {
        path: stages.from_last(kind.join([each[path].detach() for each in kept]) if kept else None, kind)
        for path, kind in outputs.items()
    }

    def backward(incoming: tuple[Tensor | None, ...]) -> None:
        parts = [
            [None] * plan.micro_batches
            if gradient is None
            else outputs[path].split(gradient, plan.micro_batches)
            for path, gradient in zip(with_gradient, incoming, strict=True)
        ]
        with torch.enable_grad():  # off by default inside of a backward
            pulls = [
                pull([found[path] for path in with_gradient], [part[index] for part in parts])
                for index, found in enumerate(kept)
            ]
            kept.clear()
            stages.begin(plan, once)
            with kept_apart(stages.parameters()) as gradients:
                runner.drain(pulls)
        stages.deposit.add(gradients, parameters())

    if with_gradient:
        values = attach_outputs([results[path] for path in with_gradient], backward)
        results |= dict(zip(with_gradient, values, strict=True))
    return _fill(plan.template, results)


def evaluate(
    stages: LocalStages,
    plan: Plan,
    calls: list[Call],
    loss_fn: LossFunction | None,
    options: PipelineOptions,
    autocast: Autocast,
) -> Any:
    """All forwards, and no backward."""
    outputs = plan.outputs
    kept: list[dict[str, Tensor]] = []

    def finish(index: int, output: Any) -> tuple[Tensor, ...]:
        found = leaves(_with_loss(output, calls[index], loss_fn))
        kept.append({path: found[path] for path in outputs})
        return ()

    if plan.evaluation is None:
        plan.evaluation = FillDrain(
            stages.torch_stages(plan, 0), stages.rank_of, plan.micro_batches, keep=False
        )
    stages.begin(plan, Pass(calls, finish, autocast.inside))
    plan.evaluation.fill()
    joined: dict[str, Tensor] = {}
    if kept:
        joined = {path: kind.join([each[path] for each in kept]) for path, kind in outputs.items()}
    if options.outputs != "last":
        joined = {path: stages.from_last(joined.get(path), kind) for path, kind in outputs.items()}
    return _fill(plan.template, joined)


def _with_loss(output: Any, call: Call, loss_fn: LossFunction | None) -> Any:
    return output if loss_fn is None else (loss_fn(output, *call.targets),)


def _fill(template: Any, results: Mapping[str, Tensor]) -> Any:
    return map_leaves(lambda path, leaf: results.get(path) if isinstance(leaf, Tensor) else leaf, template)
