"""For callers who split the sequence themselves, so that not even the logits are whole on any rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.context.region import ContextRegion, regions_of


@contextmanager
def split_sequence(
    models: nn.Module | Iterable[nn.Module],
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Iterable[Tensor] = (),
) -> Iterator[None]:
    """Let ``buffers`` hold this rank's chunk inside, and ``models`` work on chunks. Backward belongs inside.

    ``buffers`` [..., sequence, ...] are changed in place, along ``buffer_seq_dims``, and restored at the end, but for
    ``no_restore_buffers``. Everything with a sequence dimension that the forward uses must be among them, also
    position ids and labels. Take a mean over the local positions as the loss: chunks are equal, so that the mean
    over the ranks is the mean over the sequence, as for gradients. Next-token labels must be shifted before the
    sequence is split, since a chunk's last label is in another chunk (transformers: ``shift_labels``).

    Raises:
        UsageError: no context parallel model; buffers of different lengths, or which cannot be split in place.
    """
    regions = _regions(models)
    if any(region.split is not None for region in regions):
        raise UsageError("The sequence is split already by an outer context. Leave the inner context out.")
    kept = list(no_restore_buffers)
    _check_buffers(regions[0], buffers, buffer_seq_dims, kept)
    # One that is named twice, as labels that are shift_labels too, is split once.
    named = {id(buffer): (buffer, dim) for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)}
    buffers, buffer_seq_dims = [one for one, _ in named.values()], [dim for _, dim in named.values()]
    wholes = [buffer.data for buffer in buffers]
    for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
        buffer.data = regions[0].layout.local(buffer.data, dim)
    for region in regions:
        region.split = dict(zip(map(id, buffers), wholes, strict=True))
        region.split_dims = dict(zip(map(id, buffers), buffer_seq_dims, strict=True))
        region.split_length = buffers[0].shape[buffer_seq_dims[0]] if buffers else 0
    try:
        yield
    finally:
        for region in regions:
            region.split = region.ones = None
        for buffer, whole in zip(buffers, wholes, strict=True):
            if not any(buffer is one for one in kept):
                buffer.data = whole
                # A backward that comes too late, and would use the whole tensor where the forward used the
                # chunk, is refused by autograd.
                torch.autograd.graph.increment_version(buffer)


def gather_sequence(models: nn.Module | Iterable[nn.Module], tensor: Tensor, dim: int = 1) -> Tensor:
    """Gather [..., length / N, ...] to the whole sequence [..., length, ...], in order. Differentiable: gradients of
    all ranks are added up.

    Raises:
        UsageError: no context parallel model.
    """
    return _regions(models)[0].layout.gather(tensor, dim)


def _regions(models: nn.Module | Iterable[nn.Module]) -> list[ContextRegion]:
    models = [models] if isinstance(models, nn.Module) else list(models)
    regions = [region for model in models for region in regions_of(model)]
    if not regions:
        raise UsageError("No model here is context parallel. First prepare a model with parallel='cp=...'.")
    if any(region.layout != regions[0].layout for region in regions):
        raise UsageError(
            "The models split their sequences in different ways. Use a context of its own for each model."
        )
    return regions


def _check_buffers(
    region: ContextRegion, buffers: Sequence[Tensor], dims: Sequence[int], kept: Sequence[Tensor]
) -> None:
    if len(buffers) != len(dims):
        raise UsageError(
            f"There are {len(buffers)} buffers, but {len(dims)} buffer_seq_dims. Give one for each."
        )
    if any(not any(one is buffer for buffer in buffers) for one in kept):
        raise UsageError("no_restore_buffers has a tensor that is not in buffers. Name it in both.")
    lengths = []
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(buffer, Tensor) or buffer.is_nested or not buffer.is_leaf or buffer.requires_grad:
            raise UsageError(
                f"buffers[{index}] is not a plain tensor without gradient, so it cannot be split in place. Pass "
                "inputs, positions and labels."
            )
        if not -buffer.ndim <= dim < buffer.ndim:
            raise UsageError(
                f"buffers[{index}] is {list(buffer.shape)}, which has no dim {dim}. Correct its entry of "
                "buffer_seq_dims."
            )
        before = next((i for i, other in enumerate(buffers[:index]) if other is buffer), None)
        if before is not None and (dim - dims[before]) % buffer.ndim:
            raise UsageError(
                f"buffers[{index}] is the same tensor as buffers[{before}], and would be split along dims "
                f"{dims[before]} and {dim}. Pass it once."
            )
        lengths.append(buffer.shape[dim])
    if len(set(lengths)) > 1:
        raise UsageError(
            f"The buffers have sequences of {lengths} positions. Pass only buffers of one length in one call."
        )
    for length in lengths[:1]:
        region.layout.check(length)
