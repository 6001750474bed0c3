"""Batches on their way to a CUDA device: through pinned host memory, so that the host waits for nothing.

A copy of ordinary memory makes the host wait until the device has done all that it was given before. Of pinned memory,
the device fetches it by itself. torch's allocator keeps pinned memory: it notes which streams copy from it, and gives
memory that was freed to the next batch once these copies are done. So memory for few batches is pinned, and used again.

The copies are given to the stream that computes. On a stream of their own, each tensor would have to be recorded for
the one that uses it (``record_stream``), and the tensors in objects with a method ``to`` of their own are not known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import torch

from lockstep.comm.tree import Tree, mover

logger = logging.getLogger(__name__)


def batch_mover(device: torch.device, non_blocking: bool, pins: bool, rank: int) -> Callable[[Tree], Tree]:
    """Return what moves batches to ``device``; with ``pins`` through pinned memory, if it is a CUDA device."""
    copies = PinnedCopies(device, non_blocking, rank) if pins and device.type == "cuda" else None
    return mover(device, non_blocking, copies)


class PinnedCopies:
    """Copies tensors to ``device`` through pinned memory, as long as there is some.

    Others are copied as torch does, with ``non_blocking``: those that are pinned already, those on a device, and those
    of which a copy is not the same.
    """

    def __init__(self, device: torch.device, non_blocking: bool, rank: int) -> None:
        self.device = device
        self.non_blocking = non_blocking
        self.rank = rank
        self.are_possible = True

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.are_possible and is_copied_exactly(tensor) and not tensor.is_pinned():
            try:
                pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
            except RuntimeError as error:
                self._give_up(tensor, error)
            else:
                return pinned.to(self.device, non_blocking=True)
        return tensor.to(self.device, non_blocking=self.non_blocking)

    def _give_up(self, tensor: torch.Tensor, error: RuntimeError) -> None:
        self.are_possible = False
        # The next kernel would fail with what the allocation has left behind, and the one after it would not.
        with suppress(RuntimeError):
            torch.ones((), device=self.device)
        logger.log(
            logging.WARNING if self.rank == 0 else logging.INFO,
            "%d bytes of host memory could not be pinned (%s), so batches are copied to %s from ordinary memory, for "
            "which the host waits. Give the container more memory, or set DataLoaderConfiguration(pin_memory=False).",
            tensor.nbytes,
            str(error).splitlines()[0],
            self.device,
        )


def is_copied_exactly(tensor: torch.Tensor) -> bool:
    """Return whether it is an ordinary tensor of the CPU, which a copy in other memory can stand for."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
