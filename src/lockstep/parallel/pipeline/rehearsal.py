"""What is found with a batch before it is trained on: what forwards change, what the loss is over the batch, and
tensors without rows. All forwards run once more, without randomness, and nothing of them is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lockstep.comm.tree import map_leaves, tensor_leaves
from lockstep.errors import UsageError
from lockstep.parallel.determinism import WithoutChance, without_dropout
from lockstep.parallel.pipeline.errors import mixes_rows, neither_mean_nor_sum
from lockstep.parallel.pipeline.local import LocalStages
from lockstep.parallel.pipeline.micro_batch import ModelCall
from lockstep.parallel.pipeline.passes import Batch, fill_only, nothing
from lockstep.parallel.pipeline.plan import PipelinePlan, Tail
from lockstep.parallel.pipeline.reduction import (
    Edge,
    Undecided,
    edges_without_gradient,
    found,
    is_same,
    kind_of,
    same_rows,
)
from lockstep.parallel.pipeline.stage_forward import Pass
from lockstep.parallel.pipeline.state import ForwardState

BlockOutputs = dict[str, list[object]]
"""Block of the last stage -> what it returns for each micro-batch; also what the stage receives."""


@dataclass
class Rehearsal:
    """With one batch. ``compares_loss``: what the loss is over it is to be found."""

    stages: LocalStages
    batch: Batch
    compares_loss: bool
    title: str
    word: str = ""
    refusal: str = ""
    whole: BlockOutputs = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    undecided: Undecided = field(default_factory=Undecided)

    def run(self, whole_plan: PipelinePlan | None, needs_whole: bool) -> None:
        """``whole_plan``: of the whole batch as one micro-batch, to compare what comes to the last stage. It may take
        too much memory, unless it ``needs_whole`` because something comes there that has no rows.

        ``word`` is what the loss is, ``refusal`` why it cannot be right, where the last stage is; "" elsewhere.
        ``failures``: what forwards of this rank's stages have raised.
        """
        if whole_plan is not None:
            once = self._pass([self.batch.whole], nothing, self._note_whole)
            fill_only(self.stages, whole_plan, once, find=True)
            self.stages.state.forget_batch()
            if not needs_whole and any(self.stages.gather_from_ranks(bool(self.failures))):
                # Most likely of memory; anything else is raised again by the micro-batches.
                self.failures.clear()
                self.whole = {}
        compare = self._compare_with_whole if self.compares_loss or whole_plan is not None else None
        once = self._pass(self.batch.parts, self._finish, compare)
        fill_only(self.stages, self.batch.plan, once, find=True)

    def raises_on_whole(self, plan: PipelinePlan) -> bool:
        """Whether forwards of this rank's stages raise something of the whole batch too."""
        failures: list[Exception] = []

        def finish(_: int, output: object) -> tuple[Tensor, ...]:
            self.batch.with_loss(output)
            return ()

        once = replace(self._pass([self.batch.whole], finish, None), failures=failures)
        fill_only(self.stages, plan, once, find=True)
        self.stages.state.forget_batch()
        return bool(failures)

    def _pass(
        self,
        calls: list[ModelCall],
        finish: Callable[[int, object], object],
        whole: Callable[[BlockOutputs], object] | None,
    ) -> Pass:
        return Pass(
            calls,
            finish,
            self.batch.autocast.inside,
            whole=whole,
            notes_whole=False,
            failures=self.failures,
            device=self.stages.device,
        )

    def _finish(self, index: int, output: object) -> tuple[Tensor, ...]:
        self.batch.with_loss(output, index)
        return ()

    def _note_whole(self, outputs: BlockOutputs) -> tuple[Tensor, ...]:
        self.whole = outputs
        return ()

    def _compare_with_whole(self, outputs: BlockOutputs) -> tuple[Tensor, ...]:
        with self.stages.state.without_differences(lambda: self.word == "whole"):
            try:
                unknown = self._compared(outputs) if self.whole else []
                if self.compares_loss:
                    self.word = self._reduction(outputs)
                for name, path in unknown:
                    if self._matters(outputs, name, path):
                        raise self.neither(name, path)
            except UsageError as error:
                # It is told to all ranks together.
                self.refusal = str(error)
        return ()

    def neither(self, name: str, path: str) -> UsageError:
        """The refusal of a tensor without rows that is neither a mean nor a sum."""
        return neither_mean_nor_sum(self.title, self._tail.source(name, path))

    @property
    def _tail(self) -> Tail:
        assert self.batch.plan.tail is not None
        return self.batch.plan.tail

    def _compared(self, outputs: BlockOutputs) -> list[tuple[str, str]]:
        """Notes what each tensor without rows is; returns those that are neither a mean nor a sum."""
        unknown = []
        for name, each in outputs.items():
            parts = [tensor_leaves(one) for one in each]
            for path, value in tensor_leaves(self.whole[name][0]).items():
                dim = self.batch.plan.row_dim(name, path)
                mine = [part[path] for part in parts]
                if dim is not None:
                    if not same_rows(value, mine, dim, self.batch.autocast.is_on):
                        raise mixes_rows(self.title, name or self.batch.plan.traced.cuts[-1].block)
                    continue
                kind = kind_of(value, mine)
                if is_same(value, mine):
                    self.undecided.places[name, path] = not bool(value.any())
                self.batch.plan.kinds[name, path] = kind or "mean"
                if not kind:
                    unknown.append((name, path))
        return unknown

    @torch.no_grad()
    def _matters(self, outputs: BlockOutputs, name: str, path: str) -> bool:
        """Whether what the model returns depends on this tensor."""

        def changed(at: str, leaf: Tensor) -> Tensor:
            # Neither a factor nor an offset alone: normalising what follows could cancel one of them.
            return leaf * 1.5 + 1 if at == path else leaf

        other = {
            key: [map_leaves(changed, one) for one in each] if key == name else each
            for key, each in outputs.items()
        }
        first, second = (self._numbers(given) for given in (outputs, other))
        return any(not torch.equal(first[key], second[key]) for key in first)

    def _numbers(self, outputs: BlockOutputs) -> dict[str, Tensor]:
        return tensor_leaves(self.batch.with_loss(self.batch.tail_of(outputs)))

    @torch.enable_grad()
    def _reduction(self, outputs: BlockOutputs) -> str:
        plan, tail, batch = self.batch.plan, self._tail, self.batch
        path = plan.loss
        assert path is not None
        state: ForwardState = self.stages.state
        without: list[set[Edge]] = []

        def gradient(given: dict[str, object], part: int | None) -> tuple[Tensor, dict[str, Tensor]]:
            """The loss of the whole batch (``part`` None) or of a part, and its gradients in ``given``."""
            given, is_whole = map_leaves(_leaf, given), part is None
            own = {key: value for key, value in tensor_leaves(given).items() if value.requires_grad}
            call = batch.whole if part is None else batch.parts[part]
            with state.micro_batch(note=not is_whole):
                loss = tensor_leaves(batch.with_loss(tail.run(call, given, is_whole), part))[path]
            got, edges = edges_without_gradient(
                loss, lambda: torch.autograd.grad(loss, list(own.values()), allow_unused=True)
            )
            if not is_whole:
                without.append(edges)
            zeros = (torch.zeros_like(v) if g is None else g for v, g in zip(own.values(), got, strict=True))
            return loss.detach(), dict(zip(own, zeros, strict=True))

        loss, gradients = gradient(tail.joined(outputs), None)
        each = [
            gradient({name: values[index] for name, values in outputs.items()}, index)
            for index in range(len(batch.parts))
        ]
        # Open only if no micro-batch has sent a gradient through it.
        self.undecided.edges = set.intersection(*without)
        dims = {key: plan.row_dim(*_block_and_path(key)) for key in gradients}
        if all(dim is None for dim in dims.values()):
            return "whole"

        def part(index: int) -> Tensor:
            """The gradient of the batch's loss with respect to what a micro-batch gave."""
            shares = []
            for key, dim in dims.items():
                value = gradients[key]
                if dim is not None:
                    rows = value.shape[dim] // plan.micro_batches
                    value = value.narrow(dim, index * rows, rows)
                elif plan.kinds.get(_block_and_path(key)) != "sum":
                    # A mean hands each micro-batch its share of the gradient, a sum all of it.
                    value = value / plan.micro_batches
                shares.append(value.reshape(-1).float())
            return torch.cat(shares)

        wholes = [part(index) for index in range(plan.micro_batches)]
        vectors = [torch.cat([own[key].reshape(-1).float() for key in dims]) for _, own in each]
        return found(loss, [one for one, _ in each], wholes, vectors)


def _leaf(_: str, value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _block_and_path(key: str) -> tuple[str, str]:
    name, _, path = key[2:].partition("']")
    return name, path


@contextmanager
def without_chance(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Nothing is dropped or drawn at random inside, so that a batch and its parts can be compared."""
    with without_dropout(list(modules.values())), WithoutChance():
        yield
