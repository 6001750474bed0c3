"""Optimizer state in files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lockstep.comm.dtensor import is_dtensor, local
from lockstep.offload.files.direct import OffloadFile, aligned, aligned_buffer, region_of
from lockstep.offload.optimizer.regions import is_dense
from lockstep.offload.optimizer.separable import SEPARABLE, Group

_COPIED_AT_ONCE = 8 << 20


def like_parameter(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A state tensor as the optimizer would have it: a DTensor if it is a shard, as its parameter is."""
    if not is_dtensor(parameter) or is_dtensor(value) or not is_large(value, parameter):
        return value
    from torch.distributed.tensor import DTensor

    spread: Any = parameter
    return DTensor.from_local(
        value,
        spread.device_mesh,
        spread.placements,
        run_check=False,
        shape=spread.shape,
        stride=spread.stride(),
    )


def is_large(value: object, parameter: torch.Tensor) -> bool:
    """Whether a value of an optimizer's state has an element for each of the parameter, or of this rank's shard."""
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

    def __init__(self, folder: Path, optimizer_class: type, groups: Iterable[Group]) -> None:
        self._folder = folder
        self._locations: dict[tuple[int, str], tuple[OffloadFile, int, int]] = {}
        self._files: list[OffloadFile] = []
        nbytes = 0
        for group in groups:
            count = SEPARABLE[optimizer_class].state_tensors(group)
            nbytes += sum(count * _nbytes(local(p)) for p in group["params"] if p.requires_grad)
        if nbytes:
            self._files.append(OffloadFile(folder, nbytes))

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files)

    @property
    def bytes_written(self) -> int:
        return sum(file.bytes_written for file in self._files)

    def adopt(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
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
            if found[0] in self._files and (location is None or found != location[:2]):
                state[name] = value.clone()

    def _moved(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        location = self._locations.get((id(parameter), name))
        if location is not None and region_of(value) == location[:2] and is_dense(value):
            return value
        if not is_dense(value):
            value = value.contiguous()
        if location is None or location[2] < _nbytes(value):
            location = self._locations[id(parameter), name] = (*self._placed(_nbytes(value)), _nbytes(value))
        file, offset, _ = location
        write_tensor(file, offset, value)
        mapped = file.tensor(offset, (value.numel(),), value.dtype)
        return mapped.as_strided(value.shape, value.stride())

    def _placed(self, nbytes: int) -> tuple[OffloadFile, int]:
        if not self._files or self._files[-1].free_bytes < nbytes:
            # A group was added, or asks for more state than before.
            self._files.append(OffloadFile(self._folder, nbytes))
        return self._files[-1], self._files[-1].place(nbytes)


def write_tensor(file: OffloadFile, offset: int, value: torch.Tensor) -> None:
    """Write a dense tensor from wherever it is, through a small buffer."""
    flat = torch.as_strided(value, (value.numel(),), (1,)).view(torch.uint8)
    buffer = aligned_buffer(min(aligned(flat.numel()), _COPIED_AT_ONCE))
    for start in range(0, flat.numel(), _COPIED_AT_ONCE):
        part = flat[start : start + _COPIED_AT_ONCE]
        buffer[: part.numel()].copy_(part)
        file.write(offset + start, buffer[: aligned(part.numel())])


def _nbytes(tensor: torch.Tensor) -> int:
    return aligned(tensor.numel() * tensor.element_size())
