"""How a batch goes through the pipeline: with its backward, with a backward later, or without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from lockstep.comm.tree import LossFunction, map_leaves, tensor_leaves
from lockstep.parallel.pipeline.absent import check_values
from lockstep.parallel.pipeline.gradients import ParameterGradients, attach, attach_outputs, kept_apart, pull
from lockstep.parallel.pipeline.local import LocalStages
from lockstep.parallel.pipeline.micro_batch import Joined, ModelCall
from lockstep.parallel.pipeline.options import OutputsMode, PipelineOptions
from lockstep.parallel.pipeline.plan import PipelinePlan
from lockstep.parallel.pipeline.reduction import Undecided, denominators, equal
from lockstep.parallel.pipeline.settings import Settings
from lockstep.parallel.pipeline.stage import FillDrain, run, torch_schedule
from lockstep.parallel.pipeline.stage_forward import Pass
from lockstep.parallel.pipeline.traced import TensorMeta


@dataclass
class FoundReduction:
    """What the loss is over the batch: ``mean``, ``sum`` or ``whole``.

    ``was_found``: nobody has said it; then it holds as long as ``settings`` stay what they are. ``puts_together``:
    so does what tensors without rows are, of which a whole one is made.
    """

    word: str
    was_found: bool
    settings: Settings | None = None
    puts_together: bool = False
    undecided: Undecided = field(default_factory=Undecided)


WhyNot = Literal["settings", "undecided", "rows"]
"""Why a batch's loss is not what was found: the script has changed a setting, what was zero is not any more, or the
batch's rows count differently."""


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
        """The output for the whole batch or a part of it, or the loss that ``loss_fn`` makes of it."""
        call = self.whole if part is None else self.parts[part]
        return output if self.loss_fn is None else (self.loss_fn(output, *call.targets),)

    def tail_of(self, outputs: dict[str, list[object]]) -> object:
        """The model's output for the whole batch; ``outputs``: of the last stage's blocks, for each micro-batch."""
        assert self.plan.tail is not None
        return self.plan.tail.run(self.whole, self.plan.tail.joined(outputs), whole=True)


@dataclass(frozen=True)
class TrainingCall:
    """A training call of a model that returns a loss."""

    stages: LocalStages
    batch: Batch
    options: PipelineOptions
    parameters: ParametersByName
    reduction: FoundReduction

    def run(self) -> tuple[object, WhyNot | None]:
        """Forward and backward of all micro-batches; gradients wait for the backward of the loss that is returned.

        Returns:
            The output, and why ``reduction`` does not hold for this batch: nothing has happened then.
        """
        path = self.batch.plan.loss
        assert path is not None
        # The schedule runs backward before the loop does, so it must scale the loss for fp16 itself.
        scale = self.options.loss_scale() if self.options.loss_scale is not None else 1.0
        self.reduction.undecided.begin()
        train = _train_whole if self.reduction.word == "whole" else _train
        return train(self, path, scale)

    @property
    def wants_outputs(self) -> bool:
        """Beside the loss."""
        return self.options.outputs == "all" and self.batch.loss_fn is None

    @property
    def watched(self) -> Undecided | None:
        return self.reduction.undecided if self.reduction.undecided.is_watched else None

    def result(
        self,
        path: str,
        value: Tensor,
        gradients: ParameterGradients,
        scale: float,
        kept: Callable[[str, Joined], Tensor | None],
    ) -> object:
        """The output: at ``path`` the ``value``, whose backward adds ``gradients``, and what was ``kept``."""

        # The gradients were computed for a loss of factor ``scale``; the loop's backward brings the factor it really
        # has.
        def add(incoming: Tensor) -> None:
            check_values([incoming])
            self.stages.gradient_accumulator.add(
                gradients, self.parameters(), self.stages.sums, incoming / scale
            )
            gradients.clear()

        results = {path: attach(value, add)}
        if self.wants_outputs:
            for key, kind in self.batch.plan.outputs.items():
                if key != path:
                    results[key] = self.stages.from_last(kept(key, kind), kind)
        return _fill(self.batch.plan.template, results)


def _train(call: TrainingCall, path: str, scale: float) -> tuple[object, WhyNot | None]:
    """A loss that is the mean or the sum of those of micro-batches, in the order of the schedule."""
    stages, batch, plan, reduction = call.stages, call.batch, call.batch.plan, call.reduction
    undecided = reduction.undecided
    has_changed = reduction.settings is not None and reduction.settings.have_changed()
    # d(mean)/dx is the mean of the micro-batches' gradients; a sum adds them as they are.
    share = 1 / plan.micro_batches if reduction.word == "mean" else 1.0
    kept: list[dict[str, Tensor]] = []
    losses: list[Tensor] = []
    counted: list[tuple[list[object], list[Tensor]]] = []

    def finish(index: int, output: object) -> Tensor:
        found = tensor_leaves(batch.with_loss(output, index))
        losses.append(found[path].detach())
        if reduction.was_found:
            counted.append(denominators(found[path], once.ends))
            undecided.watch(found[path])
        if call.wants_outputs:
            kept.append({key: leaf.detach() for key, leaf in found.items()})
        return found[path] * (share * scale)

    # torch allocates the receive buffers with a schedule, so it is kept for all batches of these shapes.
    if plan.schedule is None:
        plan.schedule = torch_schedule(
            call.options.schedule, stages.torch_stages(plan, 1), plan.micro_batches
        )
    once = stages.begin(
        plan,
        Pass(
            batch.parts, finish, batch.autocast.inside, wants_ends=reduction.was_found, undecided=call.watched
        ),
    )
    # The loop may never call backward on this loss, so nothing may reach ``.grad`` before it does.
    with kept_apart(stages.parameters()) as gradients:
        run(plan.schedule, plan.micro_batches)
    once.ends.clear()
    like = TensorMeta.of(tensor_leaves(plan.template)[path])
    if reduction.was_found:
        why_not = _why_not(stages, has_changed, undecided, not counted or equal(counted))
        # The batch runs once more in the other way, so nothing of this one may be left in modules.
        if why_not is not None:
            stages.state.forget_batch()
            return None, why_not
    stages.state.end_batch()
    value = stages.from_last(torch.stack(losses).sum(0) * share if losses else None, like)

    def joined(key: str, kind: Joined) -> Tensor | None:
        return kind.join([each[key] for each in kept]) if kept else None

    return call.result(path, value, gradients, scale, joined), None


def _whole_is_watched(reduction: FoundReduction) -> bool:
    """The same on all ranks."""
    return reduction.undecided.is_watched or (reduction.settings is not None and reduction.puts_together)


def _why_not(
    stages: LocalStages, has_changed: bool, undecided: Undecided, is_same: bool = True
) -> WhyNot | None:
    """The same on all ranks."""
    has_moved = undecided.is_watched and any(undecided.moved())
    # One rank's doubt is everybody's: all of them run the batch again, or none does.
    changed, moved, differs = stages.any_of([has_changed, has_moved, not is_same])
    return "settings" if changed else "undecided" if moved else "rows" if differs else None


def _train_whole(call: TrainingCall, path: str, scale: float) -> tuple[object, WhyNot | None]:
    """A loss that is neither a mean nor a sum of those of micro-batches: all forwards come before all backwards, and
    what comes after the last block is computed on the whole batch."""
    stages, batch, plan, reduction = call.stages, call.batch, call.batch.plan, call.reduction
    kept: list[dict[str, Tensor]] = []
    roots: list[Tensor] = []

    def whole(outputs: dict[str, list[object]]) -> Tensor:
        found = tensor_leaves(batch.with_loss(batch.tail_of(outputs)))
        kept.append({key: leaf.detach() for key, leaf in found.items()})
        roots.append(found[path] * scale)
        return roots[0]

    runner = FillDrain(stages.torch_stages(plan, 1), stages.rank_of, plan.micro_batches, keep=True)
    is_watched = _whole_is_watched(reduction)
    has_changed = is_watched and reduction.settings is not None and reduction.settings.have_changed()
    stages.begin(plan, Pass(batch.parts, nothing, batch.autocast.inside, whole=whole, undecided=call.watched))
    with kept_apart(stages.parameters()) as gradients:
        # GPipe's order: the loss needs every micro-batch's output before any backward can begin.
        runner.fill()
        # One graph leads to the outputs of all micro-batches. The schedule wants a loss for each of them: the first one
        # pulls the whole graph, the others are zeros without a way back.
        pulls = _all_from_first(roots[0], plan.micro_batches) if roots else []
        roots.clear()
        runner.drain(pulls)
    if is_watched and (why_not := _why_not(stages, has_changed, reduction.undecided)) is not None:
        stages.state.forget_batch()
        return None, why_not
    stages.state.end_batch()
    value = stages.from_last(
        kept[0][path] if kept else None, TensorMeta.of(tensor_leaves(plan.template)[path])
    )
    return call.result(path, value, gradients, scale, lambda key, _: kept[0][key] if kept else None), None


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
    reduction: FoundReduction,
    around_backward: Callable[[], AbstractContextManager[object]],
) -> tuple[object, WhyNot | None]:
    """All forwards; the backwards run when the loop calls backward on what it makes of the outputs.

    Returns:
        As ``TrainingCall.run``.
    """
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
    undecided = reduction.undecided
    undecided.begin()
    is_watched = not plan.by_rows and _whole_is_watched(reduction)
    has_changed = is_watched and reduction.settings is not None and reduction.settings.have_changed()
    once.undecided = undecided if is_watched else None
    # Stages of its own, because another forward may come before this one's backward.
    runner = FillDrain(
        stages.torch_stages(plan, len(with_gradient)), stages.rank_of, plan.micro_batches, keep=True
    )
    stages.begin(plan, once)
    runner.fill()
    if is_watched and (why_not := _why_not(stages, has_changed, undecided)) is not None:
        stages.state.forget_batch()
        return None, why_not
    stages.state.end_batch()
    results = {
        path: stages.from_last(kind.join([each[path].detach() for each in kept]) if kept else None, kind)
        for path, kind in outputs.items()
    }

    backward = _LaterBackward(stages, plan, once, runner, with_gradient, kept, parameters, around_backward)
    if with_gradient:
        values = attach_outputs([results[path] for path in with_gradient], backward)
        results |= dict(zip(with_gradient, values, strict=True))
    return _fill(plan.template, results), None


def evaluate(stages: LocalStages, batch: Batch, outputs_to: OutputsMode) -> object:
    """All forwards, and no backward."""
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
    """All forwards; ``find``: what they change is to be found."""
    if plan.evaluation is None:
        plan.evaluation = FillDrain(
            stages.torch_stages(plan, 0), stages.rank_of, plan.micro_batches, keep=False
        )
    stages.begin(plan, once, find)
    plan.evaluation.fill()


def nothing(_: int, output: object) -> tuple[Tensor, ...]:
    """Of an output nothing is wanted."""
    return ()


def _all_from_first(root: Tensor, count: int) -> list[Tensor]:
    """What the micro-batches' backwards begin with, where the first one's goes through all of them."""
    return [root, *(torch.zeros_like(root).requires_grad_() for _ in range(count - 1))]


def _fill(template: object, results: Mapping[str, Tensor]) -> object:
    return map_leaves(lambda path, leaf: results.get(path) if isinstance(leaf, Tensor) else leaf, template)
