"""How a batch goes through the pipeline: with its backward, with a backward later, or without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.comm.tree import LossFunction, map_leaves, tensor_leaves
from lockstep.config.enums import Schedule
from lockstep.parallel.pipeline.absent import check_values
from lockstep.parallel.pipeline.errors import counts_differ
from lockstep.parallel.pipeline.gradients import attach, attach_outputs, kept_apart, pull
from lockstep.parallel.pipeline.local import LocalStages
from lockstep.parallel.pipeline.loss import Denominators, are_equal, denominators, reduction_of
from lockstep.parallel.pipeline.micro_batch import ModelCall
from lockstep.parallel.pipeline.options import OutputsMode, PipelineOptions
from lockstep.parallel.pipeline.plan import PipelinePlan
from lockstep.parallel.pipeline.stage import FillDrain, run, torch_schedule
from lockstep.parallel.pipeline.stage_forward import Pass
from lockstep.parallel.pipeline.traced import TensorMeta

ParametersByName = Callable[[], Mapping[str, nn.Parameter]]


class Autocast:
    """The autocast around a call: stages enter it for their forwards, but not for their backwards."""

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self.state = (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    @property
    def is_on(self) -> bool:
        return self.state[0]

    def outside(self) -> AbstractContextManager[object]:
        return torch.autocast(self._type, enabled=False)

    def inside(self) -> AbstractContextManager[object]:
        enabled, dtype = self.state
        # Casts of weights are not kept, because each micro-batch has a backward of its own.
        return torch.autocast(self._type, dtype=dtype, enabled=enabled, cache_enabled=False)


@dataclass(frozen=True)
class Batch:
    """A call of the model, whole and as micro-batches, and how it goes through the pipeline.

    ``loss_fn``: of the output and the targets of the call; None: the model itself returns the loss, or none is wanted.
    """

    whole: ModelCall
    parts: list[ModelCall]
    plan: PipelinePlan
    loss_fn: LossFunction | None
    autocast: Autocast

    def with_loss(self, output: object, part: int | None = None) -> object:
        """Return the output for the whole batch or a part of it, or the loss that ``loss_fn`` makes of it."""
        call = self.whole if part is None else self.parts[part]
        return output if self.loss_fn is None else (self.loss_fn(output, *call.targets),)

    def tail_of(self, outputs: dict[str, list[object]]) -> object:
        """Return the model's output for the whole batch; ``outputs``: of the last stage's blocks, by micro-batch."""
        assert self.plan.tail is not None
        return self.plan.tail.run(self.whole, self.plan.tail.joined(outputs))


def train(
    stages: LocalStages, batch: Batch, options: PipelineOptions, parameters: ParametersByName
) -> object:
    """Run forward and backward of all micro-batches of a model that returns a loss, or of a ``train_step``.

    Return the output; the backward of the loss in it adds the gradients, which wait for it, to ``.grad``.
    """
    plan = batch.plan
    assert plan.loss is not None
    wants_outputs = options.outputs == "all" and batch.loss_fn is None
    reduction = reduction_of(options.loss_reduction, batch.whole)
    # The schedule runs backward before the loop does, so it must scale the loss for fp16 itself.
    scale = options.loss_scale() if options.loss_scale is not None else 1.0
    # The loop may never call backward on this loss, so nothing may reach ``.grad`` before it does.
    with kept_apart(stages.parameters()) as gradients:
        if reduction == "whole":
            outputs = _train_whole(stages, batch, scale)
        else:
            # d(mean)/dx is the mean of the micro-batches' gradients; a sum adds them as they are.
            share = 1 / plan.micro_batches if reduction == "mean" else 1.0
            is_checked = reduction == "mean" and options.loss_reduction == "auto"
            outputs = _train_parts(stages, batch, options.schedule, share, scale, wants_outputs, is_checked)
    stages.state.end_batch()

    # The gradients were computed for a loss of factor ``scale``; the loop's backward brings the factor it really has.
    def add(incoming: Tensor) -> None:
        check_values([incoming])
        stages.gradient_accumulator.add(gradients, parameters(), stages.sums, incoming / scale)
        gradients.clear()

    like = TensorMeta.of(tensor_leaves(plan.template)[plan.loss])
    results = {plan.loss: attach(stages.from_last(outputs.get(plan.loss), like), add)}
    if wants_outputs:
        for path, kind in plan.outputs.items():
            if path != plan.loss:
                results[path] = stages.from_last(outputs.get(path), kind)
    return _fill(plan.template, results)


def _train_parts(
    stages: LocalStages,
    batch: Batch,
    schedule: Schedule,
    share: float,
    scale: float,
    wants_outputs: bool,
    is_checked: bool,
) -> dict[str, Tensor]:
    """Train micro-batch by micro-batch, in the order of the schedule: the loss is ``share`` times the sum of theirs.

    Return the loss and, if they are wanted, the other outputs by path, where the last stage is.
    """
    plan, path = batch.plan, batch.plan.loss
    assert path is not None
    kept: list[dict[str, Tensor]] = []
    counted: list[Denominators] = []

    def finish(index: int, output: object) -> Tensor:
        found = tensor_leaves(batch.with_loss(output, index))
        if is_checked:
            counted.append(denominators(found[path], once.ends))
        kept.append({key: leaf.detach() for key, leaf in found.items() if wants_outputs or key == path})
        return found[path] * (share * scale)

    # torch allocates the receive buffers with a schedule, so it is kept for all batches of these shapes.
    if plan.schedule is None:
        plan.schedule = torch_schedule(schedule, stages.torch_stages(plan, 1), plan.micro_batches)
    once = stages.begin(plan, Pass(batch.parts, finish, batch.autocast.inside, wants_ends=is_checked))
    run(plan.schedule, plan.micro_batches)
    once.ends.clear()
    # All ranks raise, or none does.
    if is_checked and stages.any_rank(bool(counted) and not are_equal(counted)):
        stages.state.forget_batch()
        raise counts_differ(stages.title)
    if not kept:
        return {}
    loss = torch.stack([each[path] for each in kept]).sum(0) * share
    others = (key for key in kept[0] if key != path and key in plan.outputs) if wants_outputs else ()
    return {path: loss} | {key: plan.outputs[key].join([each[key] for each in kept]) for key in others}


def _train_whole(stages: LocalStages, batch: Batch, scale: float) -> dict[str, Tensor]:
    """Run all forwards before all backwards: what comes after the last block is computed on the whole batch.

    Return the outputs by path, where the last stage is.
    """
    plan, path = batch.plan, batch.plan.loss
    assert path is not None
    kept: dict[str, Tensor] = {}
    roots: list[Tensor] = []

    def whole(outputs: dict[str, list[object]]) -> Tensor:
        found = tensor_leaves(batch.with_loss(batch.tail_of(outputs)))
        kept.update({key: leaf.detach() for key, leaf in found.items()})
        roots.append(found[path] * scale)
        return roots[0]

    runner = FillDrain(stages.torch_stages(plan, 1), stages.rank_of, plan.micro_batches, keep=True)
    stages.begin(plan, Pass(batch.parts, nothing, batch.autocast.inside, whole=whole))
    # GPipe's order: the loss needs every micro-batch's output before any backward can begin.
    runner.fill()
    # One graph leads to the outputs of all micro-batches. The schedule wants a loss for each of them: the first one
    # pulls the whole graph, the others are zeros without a way back.
    pulls = _all_from_first(roots[0], plan.micro_batches) if roots else []
    roots.clear()
    runner.drain(pulls)
    return kept


@dataclass(frozen=True)
class _LaterBackward:
    """The backwards of a batch whose forwards have run: called with the gradients of its outputs.

    ``paths``: of the outputs that have gradients; ``kept``: the outputs of each micro-batch, where the last stage is.
    """

    stages: LocalStages
    plan: PipelinePlan
    once: Pass
    runner: FillDrain
    paths: list[str]
    kept: list[dict[str, Tensor]]
    parameters: ParametersByName
    around: Callable[[], AbstractContextManager[object]]

    def __call__(self, incoming: tuple[Tensor | None, ...]) -> None:
        stages, plan = self.stages, self.plan
        # Gradients are off by default inside of a backward.
        with self.around(), torch.enable_grad():
            check_values(incoming)
            pulls = self._pulls(incoming)
            # Only ``pulls`` hold the graphs from here on.
            self.kept.clear()
            if pulls and not plan.by_rows:
                pulls = _all_from_first(pulls[0], plan.micro_batches)
            stages.begin(plan, self.once)
            with kept_apart(stages.parameters()) as gradients:
                self.runner.drain(pulls)
            stages.state.end_batch()
        stages.gradient_accumulator.add(gradients, self.parameters(), stages.sums)

    def _pulls(self, incoming: tuple[Tensor | None, ...]) -> list[Tensor]:
        count = self.plan.micro_batches if self.plan.by_rows else 1
        # The loop's gradient of an output is cut into rows as the batch was. An output that was computed whole has one
        # gradient, which the graph behind it divides among the micro-batches.
        parts = [
            [None] * count
            if gradient is None
            else self.plan.outputs[path].split(gradient, count)
            if self.plan.by_rows
            else [gradient]
            for path, gradient in zip(self.paths, incoming, strict=True)
        ]
        return [
            pull([found[path] for path in self.paths], [part[index] for part in parts])
            for index, found in enumerate(self.kept)
        ]


def forward_now(
    stages: LocalStages,
    batch: Batch,
    parameters: ParametersByName,
    around_backward: Callable[[], AbstractContextManager[object]],
) -> object:
    """Run all forwards; the backwards run when the loop calls backward on what it makes of the outputs."""
    plan, outputs = batch.plan, batch.plan.outputs
    with_gradient = [path for path, kind in outputs.items() if kind.requires_grad]
    kept: list[dict[str, Tensor]] = []

    def finish(_: int, output: object) -> tuple[Tensor, ...]:
        found = tensor_leaves(output)
        kept.append({path: found[path] for path in outputs})
        return tuple(found[path] for path in with_gradient)

    def whole(given: dict[str, list[object]]) -> tuple[Tensor, ...]:
        return finish(0, batch.tail_of(given))

    once = Pass(batch.parts, finish, batch.autocast.inside, whole=None if plan.by_rows else whole)
    # Stages of its own, because another forward may come before this one's backward.
    runner = FillDrain(
        stages.torch_stages(plan, len(with_gradient)), stages.rank_of, plan.micro_batches, keep=True
    )
    stages.begin(plan, once)
    runner.fill()
    stages.state.end_batch()
    results = {
        path: stages.from_last(kind.join([each[path].detach() for each in kept]) if kept else None, kind)
        for path, kind in outputs.items()
    }

    backward = _LaterBackward(stages, plan, once, runner, with_gradient, kept, parameters, around_backward)
    if with_gradient:
        values = attach_outputs([results[path] for path in with_gradient], backward)
        results |= dict(zip(with_gradient, values, strict=True))
    return _fill(plan.template, results)


def evaluate(stages: LocalStages, batch: Batch, outputs_to: OutputsMode) -> object:
    """Run all forwards, and no backward."""
    plan, outputs = batch.plan, batch.plan.outputs
    kept: list[dict[str, Tensor]] = []

    def finish(part: int | None, output: object) -> tuple[Tensor, ...]:
        found = tensor_leaves(batch.with_loss(output, part))
        kept.append({path: found[path] for path in outputs})
        return ()

    def whole(given: dict[str, list[object]]) -> tuple[Tensor, ...]:
        return finish(None, batch.tail_of(given))

    once = Pass(batch.parts, finish, batch.autocast.inside, whole=None if plan.by_rows else whole)
    fill_only(stages, plan, once)
    stages.state.end_batch()
    joined: dict[str, Tensor] = {}
    if kept:
        joined = {path: kind.join([each[path] for each in kept]) for path, kind in outputs.items()}
    if outputs_to != "last":
        joined = {path: stages.from_last(joined.get(path), kind) for path, kind in outputs.items()}
    return _fill(plan.template, joined)


@torch.no_grad()
def fill_only(stages: LocalStages, plan: PipelinePlan, once: Pass, find: bool = False) -> None:
    """Run all forwards; ``find``: what they change is to be found."""
    if plan.evaluation is None:
        plan.evaluation = FillDrain(
            stages.torch_stages(plan, 0), stages.rank_of, plan.micro_batches, keep=False
        )
    stages.begin(plan, once, find)
    plan.evaluation.fill()


def nothing(_: int, output: object) -> tuple[Tensor, ...]:
    """Ignore the output."""
    return ()


def _all_from_first(root: Tensor, count: int) -> list[Tensor]:
    """Return what the micro-batches' backwards begin with, where the first one's goes through all of them."""
    return [root, *(torch.zeros_like(root).requires_grad_() for _ in range(count - 1))]


def _fill(template: object, results: Mapping[str, Tensor]) -> object:
    return map_leaves(lambda path, leaf: results.get(path) if isinstance(leaf, Tensor) else leaf, template)
