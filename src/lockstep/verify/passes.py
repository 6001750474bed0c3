"""One forward and backward of a model, for comparison: what goes in, and what comes out.

Within ``maybe_context_parallel`` the script gives each rank its chunk of the batch. What was in ``buffers`` is known
whole. The split model's outputs are put together for the comparison, and its loss is the mean over the ranks, as
gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.comm.tree import Kwargs, LossFunction, leaves, map_leaves, map_tensors
from lockstep.parallel.autocast import AutocastForward
from lockstep.parallel.context.region import ContextRegion, regions_of
from lockstep.parallel.context.sharded_loader import IGNORED
from lockstep.parallel.pipeline.micro_batch import find_loss
from lockstep.torch_internals.compile import without_compiling
from lockstep.verify.module_sums import Observed


@dataclass(frozen=True)
class ComparedBatch:
    """What the model is called with; where the loss is computed with ``loss_function(output, *targets)``, that too."""

    args: Sequence[Any]
    kwargs: Kwargs
    loss_function: LossFunction | None = None
    targets: Sequence[object] = ()

    def detached(self, device: torch.device | None = None) -> ComparedBatch:
        """Return the same values apart from every graph, maybe on another device."""

        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().to(device or tensor.device).requires_grad_(tensor.requires_grad)

        return self.changed(copy)

    def changed(self, function: Callable[[Tensor], Tensor]) -> ComparedBatch:
        """Return the batch with each tensor replaced by ``function`` of it."""
        args, kwargs, targets = map_tensors(function, (tuple(self.args), self.kwargs, tuple(self.targets)))
        return replace(self, args=args, kwargs=kwargs, targets=targets)

    @property
    def positions(self) -> int:
        """Number of samples, or of their tokens: of [batch, sequence] integers or [batch, sequence, width] floats."""
        found = [1]
        for leaf in leaves((tuple(self.args), self.kwargs, tuple(self.targets))).values():
            if isinstance(leaf, Tensor) and not leaf.is_nested:
                found.append(
                    math.prod(leaf.shape[: 2 if leaf.ndim == 3 or not leaf.is_floating_point() else 1])
                )
        return max(found)


@dataclass
class PassResult:
    """Of one pass; tensors in host memory, by path in the output or by name in the model."""

    loss: str | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    attributes: dict[str, object] = field(default_factory=dict)
    observed: Observed = field(default_factory=Observed)


def run_pass(
    call: Callable[[ComparedBatch], object], batch: ComparedBatch, backward: Callable[[Tensor], None]
) -> PassResult:
    """Forward and backward: of the loss that the model returns, or else of a fixed combination of its outputs.

    Tensors that ranks hold parts of are gathered; collective then.
    """
    with torch.enable_grad(), without_compiling():
        output = call(batch)
        found = {
            path: _full_tensor(leaf) for path, leaf in leaves(output).items() if isinstance(leaf, Tensor)
        }
        path = find_loss(output)
        objective = found[path] if path is not None else _combination(found.values())
    result = PassResult(path, {path: leaf.detach().cpu() for path, leaf in found.items()})
    if objective is not None and objective.requires_grad:
        backward(objective)
    return result


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Let prepared models compute in the type of their weights inside, whatever ``mixed_precision`` is."""
    changed = [module for module in model.modules() if isinstance(module, AutocastForward)]
    settings = [module._autocast_settings for module in changed]
    for module, (precision, device, options) in zip(changed, settings, strict=True):
        module._autocast_settings = (precision, device, replace(options, enabled=False))
    try:
        yield
    finally:
        for module, before in zip(changed, settings, strict=True):
            module._autocast_settings = before


def _full_tensor(output: Tensor) -> Tensor:
    gathered: Tensor = output.full_tensor() if is_dtensor(output) else output
    return gathered


def _combination(outputs: Iterable[Tensor]) -> Tensor | None:
    """Return a mean of all numbers in the outputs, weighted by place."""
    terms = [
        # A sum of n such terms grows as the root of n: so each output has about the same say.
        (output * _weights(output)).sum() / math.sqrt(max(output.numel(), 1))
        for output in outputs
        if output.requires_grad and output.is_floating_point()
    ]
    return torch.stack([term.double() for term in terms]).sum() if terms else None


def _weights(like: Tensor) -> Tensor:
    """Return numbers between -1 and 1 that follow no pattern of rows or columns."""
    places = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return torch.sin(places * places * 0.37 + places + 1).to(like.dtype).view(like.shape)


SHARE = "num_items_in_batch"
"""An argument of transformers models: the number of labels, a rank's share of it where each has a chunk."""


class Chunks:
    """Of one call of a model whose sequence the script splits."""

    def __init__(self, region: ContextRegion, chunks: dict[int, Tensor]) -> None:
        self._region = region
        self._known = {**chunks, **(region.split or {})}
        self._known_dims = {**dict.fromkeys(chunks, 1), **region.split_dims}
        # A loader dealt them out: the script weighs the ranks' losses by the number of their labels.
        self._weighs = len(chunks) > 0
        self._labels: Tensor | None = None
        self._dims: dict[str, int] = {}

    @classmethod
    def of(cls, model: nn.Module, batch: ComparedBatch) -> Chunks | None:
        """Return the chunks of a batch; None where the model splits the sequence itself."""
        given = list(leaves((tuple(batch.args), batch.kwargs)).values())
        for region in regions_of(model):
            chunks = region.loader_chunks_among(given)
            if chunks or region.split is not None:
                return cls(region, chunks)
        return None

    def whole(self, batch: ComparedBatch) -> ComparedBatch:
        """Put the whole of each tensor that is in ``buffers`` in its place."""
        known, dims = self._known, self._known_dims

        def replaced(path: str, leaf: object) -> object:
            if isinstance(leaf, Tensor) and id(leaf) in known:
                self._dims[path] = dims[id(leaf)]
                return known[id(leaf)]
            return leaf

        return _scaled(_mapped(replaced, batch), self._region.layout.size)

    def why_not(self) -> str:
        """Say why not, after ``whole``."""
        if self._dims:
            return ""
        return (
            "no argument of the model is one of the buffers of maybe_context_parallel, so the whole batch is not "
            "known."
        )

    @contextmanager
    def split(self, batch: ComparedBatch) -> Iterator[ComparedBatch]:
        """Give this rank's part of a whole batch, as if it were in ``buffers``."""
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
        self._labels = parts.kwargs.get("shift_labels") if self._weighs else None
        region.split, region.split_dims = wholes, dims
        try:
            yield parts
        finally:
            region.split, region.split_dims, region.split_length = before

    def joined(self, output: object, shapes: Mapping[str, tuple[int, ...]]) -> object:
        """Return the model's output with whole tensors, which have these ``shapes``. Collective."""

        def join(path: str, leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.is_nested:
                return leaf
            if leaf.ndim == 0 and leaf.is_floating_point():
                return _mean_over(self._weighed(leaf), self._region.layout.group)
            shape = shapes.get(path, ())
            # The one dimension in which it is shorter than the whole model's output is the sequence.
            other = [
                dim for dim in range(leaf.ndim) if len(shape) == leaf.ndim and shape[dim] != leaf.shape[dim]
            ]
            return self._region.layout.gather(leaf, other[0]) if len(other) == 1 else leaf

        return map_leaves(join, output)

    def _weighed(self, loss: Tensor) -> Tensor:
        """Return a rank's mean over its labels as its part in the mean over all, times the ranks. Collective."""
        if self._labels is None:
            return loss
        group = self._region.layout.group
        # mean of own labels * own / all * ranks: the ranks' mean of these is the mean over all labels.
        own = (self._labels != IGNORED).sum()
        total = own.clone()
        dist.all_reduce(total, group=group)
        # Where a chunk has no label its mean is no number.
        return torch.where(own > 0, loss, loss.new_zeros(())) * own / total * group.size()


def _mapped(function: Callable[[str, object], object], batch: ComparedBatch) -> ComparedBatch:
    args, kwargs, targets = map_leaves(function, (tuple(batch.args), batch.kwargs, tuple(batch.targets)))
    return replace(batch, args=args, kwargs=kwargs, targets=targets)


def _scaled(batch: ComparedBatch, factor: float) -> ComparedBatch:
    count = batch.kwargs.get(SHARE)
    return batch if count is None else replace(batch, kwargs={**batch.kwargs, SHARE: count * factor})


def _mean_over(number: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' mean, with the gradient of this rank's."""
    mean = number.detach().clone()
    dist.all_reduce(mean, group=group)
    # Constant for autograd: the ranks' gradients are averaged when they are reduced.
    return number + (mean / group.size() - number.detach())


def shapes_of(outputs: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by its path."""
    return {path: tuple(output.shape) for path, output in outputs.items()}
