"""Gradients averaged over the data parallel ranks after backward, where no engine of torch does it.

For models that are split within a layer, by depth or by experts: their parameters are DTensors, belong to one stage,
or have replicas on some of the ranks only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.dtensor import is_dtensor, local
from lockstep.model.changes import attributes_set

# As DDP's: large enough for bandwidth, small beside the model.
BUCKET_BYTES = 25 * 2**20
BucketItem = TypeVar("BucketItem", bound=torch.Tensor)


@dataclass(frozen=True)
class ReplicaGroup:
    """Parameters with the ``group`` of ``size`` ranks that hold the same; None: all ranks."""

    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup | None
    size: int


class GradientAllReduce:
    """Averages the gradients of one prepared model."""

    def __init__(self, replicas: Sequence[ReplicaGroup]) -> None:
        self._replicas = [each for each in replicas if each.size > 1]
        self.is_in_no_sync = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside adds to each rank's own gradients."""
        return attributes_set(self, is_in_no_sync=True)

    def synchronised(self) -> AbstractContextManager[None]:
        """Backward inside averages, also within ``no_sync``."""
        return attributes_set(self, is_in_no_sync=False)

    @torch.no_grad()
    def average(self) -> None:
        """Average all gradients, in place, unless that is held back. Collective.

        Doing it twice does no harm: an average of equal numbers is that number. A gradient that only some ranks
        lack counts as zero there; one that all lack stays away.
        """
        if self.is_in_no_sync:
            return
        for each in self._replicas:
            for bucket in buckets(p for p in each.parameters if p.requires_grad):
                _average(bucket, each)


def buckets(tensors: Iterable[BucketItem], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[BucketItem]]:
    """Return the tensors, of any shape, in lists of one type and device and of at most ``limit_bytes`` (or one tensor).

    DTensors count by their local parts. The lists are the same on all ranks.
    """
    waiting: dict[tuple[torch.dtype, torch.device], list[BucketItem]] = defaultdict(list)
    nbytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        part = local(tensor)
        kind = part.dtype, part.device
        if waiting[kind] and nbytes[kind] + part.nbytes > limit_bytes:
            yield waiting[kind]
            waiting[kind], nbytes[kind] = [], 0
        waiting[kind].append(tensor)
        nbytes[kind] += part.nbytes
    yield from waiting.values()


def _average(bucket: list[nn.Parameter], replicas: ReplicaGroup) -> None:
    """Average the gradients of a bucket as one vector, by one all-reduce.

    A missing gradient is sent as negative zeros, and only a sum of negative zeros is one: then no rank has it.
    """
    # They have no memory of their own before they are concatenated.
    parts = [
        local(p).new_zeros(()).neg().expand_as(local(p)) if p.grad is None else local(p.grad) for p in bucket
    ]
    message = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(message, group=replicas.group)
    means = (message / replicas.size).split([part.numel() for part in parts])
    for parameter, mean in zip(bucket, means, strict=True):
        mean = mean.view_as(local(parameter))
        if parameter.grad is not None:
            local(parameter.grad).copy_(mean)
        # Only where it matters are the numbers read, because on an accelerator reading waits for them.
        elif not is_negative_zero(mean):
            parameter.grad = _laid_out_like(parameter, mean)


def is_negative_zero(gradient: torch.Tensor) -> torch.Tensor:
    """Return whether all elements are -0.0, 0-d. An empty tensor counts as one of them."""
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return (values.signbit() & (values == 0)).all()


def _laid_out_like(parameter: object, part: torch.Tensor) -> torch.Tensor:
    """Return this rank's ``part`` of a gradient, laid out as the parameter is."""
    if not is_dtensor(parameter):
        return part.clone()
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
