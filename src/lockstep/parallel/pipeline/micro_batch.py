"""A batch cut into micro-batches, and their outputs joined again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.tree import leaves, map_leaves
from lockstep.config.enums import Schedule
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.options import fits, least_micro_batches

BatchDims = Mapping[str, "int | None"]
"""Path of a tensor in a call -> the dimension that is cut into micro-batches; None: each gets it whole."""


@dataclass(frozen=True)
class ModelCall:
    """Arguments of the model, and targets of the loss where that is computed outside of the model."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    targets: tuple[object, ...] = ()

    @property
    def tree(self) -> tuple[object, ...]:
        return (self.args, self.kwargs, self.targets)


def count_for_training(asked: int, batch: int, schedule: Schedule, ranks: int) -> int:
    """Return how many micro-batches a batch of ``batch`` rows is cut into; ``asked``: 0 chooses.

    Chosen are four for each rank, or else the most below that which divide the batch.

    Raises:
        UsageError: they do not divide the batch, or are too few for the schedule.
    """
    least = least_micro_batches(schedule, ranks)
    if asked:
        if asked < least or not fits(schedule, asked, ranks):
            rule = f"at least {least}" if asked < least else f"a multiple of {ranks}"
            raise UsageError(
                f"micro_batches={asked}, but schedule={schedule} on {ranks} ranks needs {rule}. Use "
                f"micro_batches={4 * ranks}."
            )
        if batch % asked:
            raise UsageError(
                f"A batch of {batch} cannot be cut into micro_batches={asked} of equal size. Make the batch a "
                f"multiple of {asked}, drop the last incomplete batch, or leave micro_batches out."
            )
        return asked
    # With m = 4 p micro-batches the bubble of 1f1b, (p - 1) / (m + p - 1), is below a fifth.
    for count in range(max(4 * ranks, least), least - 1, -1):
        if batch % count == 0 and fits(schedule, count, ranks):
            return count
    raise UsageError(
        f"A batch of {batch} cannot be cut into micro-batches for schedule={schedule} on {ranks} ranks, which needs "
        f"{least} to {max(4 * ranks, least)} of equal size. Make the batch a multiple of {least}."
    )


def count_for_evaluation(asked: int, batch: int, ranks: int) -> int:
    """Return the most micro-batches that divide the batch, at most as many as asked for. One is enough."""
    return next(count for count in range(min(asked or 4 * ranks, max(batch, 1)), 0, -1) if batch % count == 0)


def cut(call: ModelCall, count: int, dims: BatchDims) -> list[ModelCall]:
    """Cut a call into ``count`` calls with equal parts of every tensor that ``dims`` gives a dimension; the rest goes
    into each."""

    def part(index: int) -> ModelCall:
        def slice_leaf(path: str, leaf: object) -> object:
            dim = dims.get(path)
            if not isinstance(leaf, Tensor) or dim is None:
                return leaf
            rows = leaf.shape[dim] // count
            return leaf.narrow(dim, index * rows, rows)

        return ModelCall(*map_leaves(slice_leaf, call.tree))

    return [part(index) for index in range(count)]


@dataclass(frozen=True)
class Joined:
    """How a tensor of the outputs of all micro-batches comes together: rows one after the other.

    ``by_rows``: False for what has no rows, such as numbers: only a pass of the whole batch knows it.
    """

    shape: torch.Size
    dtype: torch.dtype
    by_rows: bool
    requires_grad: bool

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def split(self, gradient: Tensor, count: int) -> list[Tensor]:
        """Return the gradient for each micro-batch's tensor: [batch, ...] in ``count`` parts of its rows."""
        return list(gradient.chunk(count))


def joined(part: Tensor, whole: Tensor, count: int) -> Joined:
    """Return how an output is joined that is ``part`` for a micro-batch and ``whole`` for the batch."""
    by_rows = part.ndim > 0 and whole.shape == (count * part.shape[0], *part.shape[1:])
    return Joined(whole.shape, whole.dtype, by_rows, part.requires_grad)


def find_loss(output: object) -> str | None:
    """Return the path of the loss in a model's output; None: it returns no loss.

    A loss is the output itself, its ``loss``, or the first of a tuple, if that is a number with a gradient.
    """
    found = leaves(output)
    # `.loss` of dataclasses, ['loss'] of dicts and transformers' outputs, [0] of tuples
    for path in ("", ".loss", "['loss']", "[0]"):
        leaf = found.get(path)
        if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.requires_grad:
            return path
    return None
