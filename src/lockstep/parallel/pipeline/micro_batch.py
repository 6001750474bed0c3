"""A batch cut into micro-batches, and their outputs joined again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.tree import leaves, map_leaves
from lockstep.config.enums import Schedule
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.assign import fits, least_micro_batches


@dataclass(frozen=True)
class Call:
    """Arguments of the model, and targets of the loss where that is computed outside of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...] = ()

    @property
    def tree(self) -> tuple[Any, ...]:
        return (self.args, self.kwargs, self.targets)


def batch_size(call: Call) -> int:
    """Size of dim 0 of the first tensor of ``call`` that has one.

    Raises:
        UsageError: there is none.
    """
    for leaf in leaves(call.tree).values():
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    raise UsageError(
        "The model was called without a tensor that has a batch dimension, so a pipeline cannot cut it into "
        "micro-batches. Pass the batch as tensors."
    )


def count_for_training(asked: int, batch: int, schedule: Schedule, ranks: int) -> int:
    """How many micro-batches a batch of ``batch`` rows is cut into; ``asked``: 0 chooses.

    Chosen are four for each rank, or else the most below that which divide the batch.

    Raises:
        UsageError: they do not divide the batch, or are too few for the schedule.
    """
    least = least_micro_batches(schedule, ranks)
    if asked:
        if asked < least or not fits(schedule, asked, ranks):
            rule = f"at least {least}" if asked < least else f"a multiple of {ranks}"
            raise UsageError(
                f"micro_batches={asked}, but schedule={schedule} on {ranks} ranks needs {rule}. "
                f"Take micro_batches={4 * ranks}."
            )
        if batch % asked:
            raise UsageError(
                f"A batch of {batch} cannot be cut into micro_batches={asked} of equal size. "
                f"Make the batch a multiple of {asked}, drop the last incomplete one, or leave micro_batches out."
            )
        return asked
    for count in range(max(4 * ranks, least), least - 1, -1):
        if batch % count == 0 and fits(schedule, count, ranks):
            return count
    raise UsageError(
        f"A batch of {batch} cannot be cut into micro-batches for schedule={schedule} on {ranks} ranks, which needs "
        f"{least} to {max(4 * ranks, least)} of equal size. Make the batch a multiple of {least}."
    )


def count_for_evaluation(asked: int, batch: int, ranks: int) -> int:
    """The most micro-batches that divide the batch, at most as many as asked for. One is enough."""
    return next(count for count in range(min(asked or 4 * ranks, max(batch, 1)), 0, -1) if batch % count == 0)


def cut(call: Call, count: int, whole: Sequence[str] = ()) -> list[Call]:
    """``count`` calls with equal parts of every tensor whose dim 0 is the batch; the rest goes into each."""
    size = batch_size(call)
    rows = size // count
    kept = {f"[1][{name!r}]" for name in whole}

    def part(index: int) -> Call:
        def slice_leaf(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != size:
                return leaf
            if any(path.startswith(start) for start in kept):
                return leaf
            return leaf[index * rows : (index + 1) * rows]

        return Call(*map_leaves(slice_leaf, call.tree))

    return [part(index) for index in range(count)]


@dataclass(frozen=True)
class Joined:
    """How a tensor of the outputs of all micro-batches comes together.

    ``mean``: a number, averaged; else rows one after the other.
    """

    shape: torch.Size
    dtype: torch.dtype
    mean: bool
    requires_grad: bool

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        if self.mean:
            return torch.stack(list(parts)).mean(dim=0)
        return torch.cat(list(parts))

    def split(self, gradient: Tensor, count: int) -> list[Tensor]:
        """The gradient for each micro-batch's tensor."""
        if self.mean:
            return [gradient / count] * count
        return list(gradient.chunk(count))


def joined(path: str, leaf: Tensor, rows: int, count: int) -> Joined:
    """How the output ``leaf`` of a micro-batch of ``rows`` rows is joined with the others.

    Raises:
        UsageError: it is no number and has no batch dimension.
    """
    if leaf.ndim == 0 and leaf.is_floating_point():
        return Joined(leaf.shape, leaf.dtype, True, leaf.requires_grad)
    if leaf.ndim == 0 or leaf.shape[0] % rows:
        raise UsageError(
            f"The model returns at output{path} a tensor of shape {tuple(leaf.shape)} for {rows} samples, which cannot "
            "be joined over micro-batches. Return numbers (their mean is taken) or tensors whose dim 0 is the batch."
        )
    shape = torch.Size((leaf.shape[0] * count, *leaf.shape[1:]))
    return Joined(shape, leaf.dtype, False, leaf.requires_grad)


def find_loss(output: Any) -> str | None:
    """The path of the loss in a model's output; None: it returns no loss.

    A loss is the output itself, its ``loss``, or the first of a tuple, if that is a number with a gradient.
    """
    found = leaves(output)
    # `.loss` of dataclasses, ['loss'] of dicts and transformers' outputs, [0] of tuples
    for path in ("", ".loss", "['loss']", "[0]"):
        leaf = found.get(path)
        if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.requires_grad:
            return path
    return None
