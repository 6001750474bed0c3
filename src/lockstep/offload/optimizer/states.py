"""Optimizer state in files: regions of them, moved to and from one buffer in few large reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch

from lockstep.comm.dtensor import is_dtensor, local
from lockstep.offload.files.direct import ALIGNMENT, OffloadFile, aligned, aligned_buffer, region_of
from lockstep.offload.optimizer.kernel import SEPARABLE, GroupSettings


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
        """Return the tensor as it lies in a buffer, uint8 [nbytes]: a view of its shape and dtype."""
        like = self.like
        data = buffer[self.place : self.place + like.numel() * like.element_size()].view(like.dtype)
        return torch.as_strided(data, like.shape, like.stride(), data.storage_offset())


def region_to_move(tensor: torch.Tensor, changes: bool) -> StepRegion | None:
    """Return where a tensor lives in a file, if it can be moved from there as it is; None otherwise."""
    if not tensor.numel() or (found := region_of(tensor)) is None:
        return None
    file, offset = found
    # Direct I/O begins at multiples of ALIGNMENT, and only a dense tensor is one piece of the file.
    if offset % ALIGNMENT or not is_dense(tensor):
        return None
    return StepRegion(file, offset, aligned(tensor.numel() * tensor.element_size()), tensor, changes)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie side by side in memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def in_order(regions: Iterable[StepRegion]) -> list[StepRegion]:
    """Regions as they lie in their files."""
    return sorted(regions, key=lambda region: (id(region.file), region.offset))


def arrange(regions: Iterable[StepRegion], start: int = 0) -> int:
    """Give regions (``in_order``) their places in one buffer from ``start`` on; returns where the last one ends."""
    end = start
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
    """Yield the first of each run of regions that follow each other in file and buffer, and the run's size."""
    # They come ``in_order``: neighbours in the file are neighbours in the buffer.
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


_COPIED_AT_ONCE = 8 << 20


def like_parameter(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a state tensor as the optimizer would have it: a DTensor if it is a shard, as its parameter
    is.
    """
    if not is_dtensor(parameter) or is_dtensor(value) or not is_large(value, parameter):
        return value
    from torch.distributed.tensor import DTensor

    spread = parameter
    return DTensor.from_local(
        value,
        spread.device_mesh,
        spread.placements,
        run_check=False,
        shape=spread.shape,
        stride=spread.stride(),
    )


def is_large(value: object, parameter: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Return whether a value of an optimizer's state has an element for each of the parameter, or of this rank's
    shard."""
    return (
        isinstance(value, torch.Tensor) and value.dim() > 0 and local(value).shape == local(parameter).shape
    )


class StateFiles:
    """Regions of files for the state tensors that are as large as their parameter.

    Args:
        folder: Where.
        optimizer_class, groups: Space is reserved at once for what this optimizer will need.

    Raises:
        OffloadError: The folder cannot be written to, or has too little space.
    """

    def __init__(self, folder: Path, optimizer_class: type, groups: Iterable[GroupSettings]) -> None:
        self._folder = folder
        self._locations: dict[tuple[int, str], tuple[OffloadFile, int, int]] = {}
        self.files: list[OffloadFile] = []
        nbytes = 0
        for group in groups:
            count = SEPARABLE[optimizer_class].state_tensors(group)
            nbytes += sum(count * aligned(local(p).nbytes) for p in group["params"] if p.requires_grad)
        if nbytes:
            self.files.append(OffloadFile(folder, nbytes))

    def adopt(self, parameter: torch.Tensor, state: dict[str, object]) -> None:
        """Write what is large in a parameter's state to its region, unless it is there, and map it from there."""
        for name, value in state.items():
            if is_large(value, parameter) and local(value).numel() and local(value).device.type == "cpu":
                state[name] = like_parameter(self._moved(parameter, name, local(value)), parameter)

    def separate(self, parameter: torch.Tensor, state: dict[str, object]) -> None:
        """Copy what lies where another parameter's state is about to be written, as a state_dict may have it."""
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or (found := region_of(local(value))) is None:
                continue
            location = self._locations.get((id(parameter), name))
            if found[0] in self.files and (location is None or found != location[:2]):
                state[name] = value.clone()

    def _moved(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        location = self._locations.get((id(parameter), name))
        if location is not None and region_of(value) == location[:2] and is_dense(value):
            return value
        if not is_dense(value):
            value = value.contiguous()
        nbytes = aligned(value.nbytes)
        if location is None or location[2] < nbytes:
            location = self._locations[id(parameter), name] = (*self._placed(nbytes), nbytes)
        file, offset, _ = location
        write_tensor(file, offset, value)
        mapped = file.tensor(offset, (value.numel(),), value.dtype)
        return mapped.as_strided(value.shape, value.stride())

    def _placed(self, nbytes: int) -> tuple[OffloadFile, int]:
        if not self.files or self.files[-1].free_bytes < nbytes:
            # A group was added, or asks for more state than before.
            self.files.append(OffloadFile(self._folder, nbytes))
        return self.files[-1], self.files[-1].place(nbytes)


def write_tensor(file: OffloadFile, offset: int, value: torch.Tensor) -> None:
    """Write a dense tensor from wherever it is, through a small buffer."""
    # In the order of memory, whatever the strides are: the mapped tensor gets the same strides.
    flat = torch.as_strided(value, (value.numel(),), (1,)).view(torch.uint8)
    buffer = aligned_buffer(min(aligned(flat.numel()), _COPIED_AT_ONCE))
    for start in range(0, flat.numel(), _COPIED_AT_ONCE):
        part = flat[start : start + _COPIED_AT_ONCE]
        buffer[: part.numel()].copy_(part)
        # Rounded up to ALIGNMENT, as the region is.
        file.write(offset + start, buffer[: aligned(part.numel())])
