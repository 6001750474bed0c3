"""Calls within ``maybe_context_parallel``, where the script gives each rank its chunk: the whole batch, and back.

What was in ``buffers`` is known whole. The split model's outputs are put together for the comparison, and its loss is
the mean over the ranks, as gradients are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.check.passes import ComparedBatch
from lockstep.comm.tree import map_leaves
from lockstep.parallel.context.region import ContextRegion, regions_of

SHARE = "num_items_in_batch"
"""An argument of transformers models: the number of labels, a rank's share of it where each has a chunk."""


class Chunks:
    """Of one call of a model whose sequence the script splits."""

    def __init__(self, region: ContextRegion) -> None:
        self._region = region
        self._dims: dict[str, int] = {}

    @classmethod
    def of(cls, model: nn.Module) -> Chunks | None:
        """None where the model splits the sequence itself."""
        return next((cls(region) for region in regions_of(model) if region.split is not None), None)

    def whole(self, batch: ComparedBatch) -> ComparedBatch:
        """With the whole of each tensor that is in ``buffers``."""
        known, dims = self._region.split or {}, self._region.split_dims

        def replaced(path: str, leaf: object) -> object:
            if isinstance(leaf, Tensor) and id(leaf) in known:
                self._dims[path] = dims[id(leaf)]
                return known[id(leaf)]
            return leaf

        return _scaled(_mapped(replaced, batch), self._region.layout.size)

    def why_not(self) -> str:
        """After ``whole``."""
        if self._dims:
            return ""
        return "no argument of the model is one of the buffers of maybe_context_parallel, so its whole is not known."

    @contextmanager
    def split(self, batch: ComparedBatch) -> Iterator[ComparedBatch]:
        """This rank's part of a whole batch, as if it were in ``buffers``."""
        region = self._region
        before = region.split, region.split_dims, region.split_length
        wholes: dict[int, Tensor] = {}
        dims: dict[int, int] = {}

        def cut(path: str, leaf: Any) -> object:
            dim = self._dims.get(path)
            if dim is None:
                return leaf
            part = region.layout.local(leaf, dim)
            wholes[id(part)], dims[id(part)] = leaf, dim
            region.split_length = part.shape[dim]
            return part

        parts = _scaled(_mapped(cut, batch), 1 / region.layout.size)
        region.split, region.split_dims = wholes, dims
        try:
            yield parts
        finally:
            region.split, region.split_dims, region.split_length = before

    def joined(self, output: object, shapes: Mapping[str, tuple[int, ...]]) -> object:
        """The model's output with whole tensors, which have these ``shapes``. Collective."""

        def join(path: str, leaf: Any) -> object:
            if not isinstance(leaf, Tensor) or leaf.is_nested:
                return leaf
            if leaf.ndim == 0 and leaf.is_floating_point():
                return _mean_over(leaf, self._region.layout.group)
            shape = shapes.get(path, ())
            other = [
                dim for dim in range(leaf.ndim) if len(shape) == leaf.ndim and shape[dim] != leaf.shape[dim]
            ]
            return self._region.layout.gather(leaf, other[0]) if len(other) == 1 else leaf

        return map_leaves(join, output)


def _mapped(function: Any, batch: ComparedBatch) -> ComparedBatch:
    args, kwargs, targets = map_leaves(function, (tuple(batch.args), batch.kwargs, tuple(batch.targets)))
    return replace(batch, args=args, kwargs=kwargs, targets=targets)


def _scaled(batch: ComparedBatch, factor: float) -> ComparedBatch:
    count = batch.kwargs.get(SHARE)
    return batch if count is None else replace(batch, kwargs={**batch.kwargs, SHARE: count * factor})


def _mean_over(number: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' mean, with the gradient of this rank's."""
    mean = number.detach().clone()
    dist.all_reduce(mean, group=group)
    return number + (mean / group.size() - number.detach())


def shapes_of(outputs: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Of each tensor, by its path."""
    return {path: tuple(output.shape) for path, output in outputs.items()}
