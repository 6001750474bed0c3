"""Load weights from files into a model: mapped where they can be, else one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.placement.checkpoint_files import stored_tensors
from lockstep.placement.matching import loaded_dtype, match
from lockstep.placement.offload_folder import Kept, keep
from lockstep.placement.seats import CPU, Seat, assign_seats, check_device_map, main_device_of
from lockstep.placement.sizes import dtype_of
from lockstep.placement.stored import MappedFiles, Stored, converted, read
from lockstep.placement.ties import find_places

Path = str | os.PathLike[str]


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Path,
    device_map: Mapping[str, Any] | None = None,
    offload_folder: Path | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, each tensor where the device map says; call ``dispatch_model`` then.

    Tensors for the CPU and the disk are mapped from safetensors files: they take memory only where they are used, and
    may be written to, which the file does not see. Others are read one at a time. Everything is checked before
    the model changes.

    Args:
        model: Its tensors may be on the meta device.
        checkpoint: A ``.safetensors`` or ``.bin`` file, the index of shards, or a folder with either.
        device_map: Module or tensor -> device. None: parameters stay on their devices, and those without values
            come to the CPU.
        offload_folder: Where tensors for the disk are written that cannot be used as they are in the checkpoint,
            because their dtype differs or it is no safetensors file.
        dtype: What floating-point tensors become. None: what they are in the model.
        offload_state_dict: Accepted; tensors are never held together.
        offload_buffers: Whether buffers of modules on the disk stay there.
        keep_in_fp32_modules: Parts of names of tensors that stay float32 where ``dtype`` is float16.
        strict: Whether checkpoint and model must have the same tensors.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not fit.
        ConfigError: the device map or another argument is wrong.
        OffloadError: ``offload_folder`` is full or holds other weights.
    """
    _refuse(offload_8bit_bnb, full_state_dict, broadcast_from_rank0)
    wanted = dtype_of(dtype)
    if device_map is None:
        seats = _where_they_are(model)
    else:
        check_device_map(model, device_map)
        seats = assign_seats(model, device_map, main_device_of(device_map), offload_buffers)
    stored = match(
        model, [seat.place for seat in seats], stored_tensors(checkpoint), strict, os.fspath(checkpoint)
    )
    loads = [
        _Load(
            seat,
            stored[seat.name],
            loaded_dtype(seat.place, stored[seat.name], wanted, keep_in_fp32_modules or ()),
        )
        for seat in seats
        if seat.name in stored
    ]
    for load, data in _prepared(loads, offload_folder, in_place=device_map is None):
        load.seat.place.put(data)


@dataclass(frozen=True)
class _Load:
    """A tensor of the checkpoint, and where it goes."""

    seat: Seat
    stored: Stored
    dtype: torch.dtype

    def pieces(self, files: MappedFiles) -> Iterator[torch.Tensor]:
        return converted(self.stored.pieces(files), self.dtype)


def _prepared(loads: list[_Load], folder: Path | None, in_place: bool) -> list[tuple[_Load, torch.Tensor]]:
    """The data of each tensor; nothing of the model changes, except that with ``in_place`` what has values there."""
    files = MappedFiles()
    mapped: dict[int, torch.Tensor] = {}
    for load in loads:
        data = load.stored.mapped(files)  # all files at first: which memory is whose is then asked for once
        if data is not None and _is_mappable(load):
            mapped[id(load)] = data
    rewritten = [load for load in loads if load.seat.on_disk and id(load) not in mapped]
    if rewritten:
        mapped |= _rewritten(rewritten, folder, files)
    prepared = []
    for load in loads:
        old = load.seat.place.tensor
        if in_place and not old.is_meta and old.dtype == load.dtype:
            with torch.no_grad():
                old.copy_(read(load.stored, files, load.dtype))
        elif id(load) in mapped:
            prepared.append((load, mapped[id(load)]))
        else:
            prepared.append((load, read(load.stored, files, load.dtype, load.seat.home)))
    return prepared


def _is_mappable(load: _Load) -> bool:
    if load.seat.home != CPU or load.stored.dtype != load.dtype:
        return False
    # Buffers are written to in training, and are small.
    return load.seat.place.is_parameter or load.seat.on_disk


def _rewritten(loads: list[_Load], folder: Path | None, files: MappedFiles) -> dict[int, torch.Tensor]:
    if folder is None:
        load = loads[0]
        why = (
            f"is stored as {load.stored.dtype} and becomes {load.dtype}"
            if load.stored.dtype != load.dtype
            else "is not in a safetensors file, or not aligned there"
        )
        raise ConfigError(
            f"device_map places '{load.seat.name}' on the disk, but it {why}, so that it has to be written anew. "
            "Pass offload_folder, or the checkpoint's own dtype."
        )
    kept = [
        Kept(
            load.seat.name,
            load.dtype,
            load.seat.place.tensor.shape,
            partial(load.pieces, files),
            f"{load.stored.source} {load.dtype}",
        )
        for load in loads
    ]
    regions = keep(os.fspath(folder), kept)
    mapped = {}
    for load in loads:
        region = regions[load.seat.name]
        data = region.mapped(files)
        mapped[id(load)] = read(region, files, region.dtype) if data is None else data
    return mapped


def _where_they_are(model: nn.Module) -> list[Seat]:
    seats = []
    for place in find_places(model):
        device = CPU if place.tensor.is_meta else place.tensor.device
        seats.append(Seat(place, device, False, device))
    return seats


def _refuse(offload_8bit_bnb: bool, full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    if offload_8bit_bnb:
        raise ConfigError("offload_8bit_bnb=True needs bitsandbytes, which is not supported. Leave it out.")
    if broadcast_from_rank0 or not full_state_dict:
        raise ConfigError(
            "broadcast_from_rank0=True and full_state_dict=False are not supported: each process maps the files "
            "itself, and those of one machine share the memory. Leave them out."
        )
