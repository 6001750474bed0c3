"""Means over the ranks of whole models, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from lockstep.comm.collectives import Communicator
from lockstep.torch_internals import optim as torch_optim

BUCKET_BYTES = 25 * 2**20  # as DDP's: large enough for bandwidth, small beside the model


def floating_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Buffers with a mean, such as running statistics; counters and masks have none."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def buckets(tensors: Iterable[torch.Tensor], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[torch.Tensor]]:
    """The tensors, in order, in lists of one type and device and of at most ``limit_bytes`` (or one tensor)."""
    waiting: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = waiting.setdefault((tensor.dtype, tensor.device), [])
        if bucket and sum(one.nbytes for one in bucket) + tensor.nbytes > limit_bytes:
            yield list(bucket)
            bucket.clear()
        bucket.append(tensor)
    yield from waiting.values()


@torch.no_grad()
def means(
    communicator: Communicator, tensors: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tensor, its mean over the ranks) of each, by type and device; halves are added up in fp32. Collective."""
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        parts = communicator.reduce(flat, "mean").split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            yield tensor, part.view(tensor.shape)


@torch.no_grad()
def average(communicator: Communicator, tensors: Iterable[torch.Tensor]) -> None:
    """Replace each tensor by its mean over the ranks. Collective."""
    for tensor, mean in means(communicator, tensors):
        tensor.detach().copy_(mean)


def agree_on_loss_scale(communicator: Communicator, scaler: torch.amp.GradScaler | None) -> None:
    """Take the smallest of the ranks' fp16 loss scales, which each adjusted by itself. Collective with a scaler."""
    if scaler is None or communicator.world_size == 1:
        return
    state = scaler.state_dict()
    if not state:  # it is switched off
        return
    scale, growth = min(communicator.gather_object([(state["scale"], state[torch_optim.GROWTH_TRACKER])]))
    scaler.load_state_dict({**state, "scale": scale, torch_optim.GROWTH_TRACKER: growth})
