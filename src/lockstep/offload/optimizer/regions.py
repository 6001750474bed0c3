"""Tensors that live in files, moved to and from one buffer in few large reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from lockstep.offload.files.direct import ALIGNMENT, OffloadFile, aligned, region_of


@dataclass(eq=False)
class StepRegion:
    """Where a tensor lives: ``nbytes`` (aligned) at ``offset`` of ``file``; and where in a buffer it is held.

    ``changes``: whether it is written back.
    """

    file: OffloadFile
    offset: int
    nbytes: int
    like: torch.Tensor
    changes: bool
    place: int = 0

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor as it lies in a buffer, uint8 [nbytes]: a view of its shape and dtype."""
        like = self.like
        data = buffer[self.place : self.place + like.numel() * like.element_size()].view(like.dtype)
        return torch.as_strided(data, like.shape, like.stride(), data.storage_offset())


def region_to_move(tensor: torch.Tensor, changes: bool) -> StepRegion | None:
    """Where a tensor lives in a file, if it can be moved from there as it is; None otherwise."""
    if not tensor.numel() or (found := region_of(tensor)) is None:
        return None
    file, offset = found
    if offset % ALIGNMENT or not is_dense(tensor):
        return None
    return StepRegion(file, offset, aligned(tensor.numel() * tensor.element_size()), tensor, changes)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def arrange(regions: list[StepRegion]) -> int:
    """Sort regions as they lie in their files, and give each its place in one buffer; returns the buffer's size."""
    regions.sort(key=lambda region: (id(region.file), region.offset))
    end = 0
    for region in regions:
        region.place = end
        end += region.nbytes
    return end


def read_all(regions: Iterable[StepRegion], buffer: torch.Tensor) -> None:
    """Fill a buffer, uint8 [nbytes]; regions that are neighbours in the file are read at once."""
    for first, nbytes in _runs(regions):
        first.file.read(first.offset, buffer[first.place : first.place + nbytes])


def write_all(regions: Iterable[StepRegion], buffer: torch.Tensor) -> None:
    """Write a buffer, uint8 [nbytes], back; regions that are neighbours in the file are written at once."""
    for first, nbytes in _runs(regions):
        first.file.write(first.offset, buffer[first.place : first.place + nbytes])


def _runs(regions: Iterable[StepRegion]) -> Iterator[tuple[StepRegion, int]]:
    """The first of each run of regions that follow each other in file and buffer, and the run's size."""
    first: StepRegion | None = None
    nbytes = 0
    for region in regions:
        if first is not None and (region.file, region.offset, region.place) == (
            first.file,
            first.offset + nbytes,
            first.place + nbytes,
        ):
            nbytes += region.nbytes
            continue
        if first is not None:
            yield first, nbytes
        first, nbytes = region, region.nbytes
    if first is not None:
        yield first, nbytes
