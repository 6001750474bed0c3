"""Bring the tensors of a model to where they are at rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.config.values import shown
from lockstep.errors import ConfigError, OffloadError, UsageError
from lockstep.offload.device_map.placement import TensorPlacement
from lockstep.offload.files.offload_folder import Kept, index_of, keep, regions_of
from lockstep.offload.files.stored import FileBacked, FileRegion, MappedFiles, pieces_on_cpu, read

Path = str | os.PathLike[str]


def bring_home(
    model: nn.Module,
    seats: list[TensorPlacement],
    state_dict: Mapping[str, torch.Tensor] | None,
    folder: Path | None,
    index: Mapping[str, Mapping[str, Any]] | None,
) -> None:
    """Put every tensor where its seat says.

    Raises:
        ConfigError: a tensor is to be on the disk, but no folder is given; or one of ``state_dict`` does not fit.
        OffloadError: the folder cannot be written or holds other weights.
        UsageError: a tensor has no values.
    """
    path = None if folder is None else os.fspath(folder)
    files = MappedFiles()
    data = _given(seats, state_dict or {}) | _found(seats, state_dict or {}, path, index, files)
    empty = [seat.name for seat in seats if seat.place.tensor.is_meta and seat.name not in data]
    if empty:
        raise UsageError(
            f"{', '.join(map(shown, empty[:5]))}{' and others' * (len(empty) > 5)} of {type(model).__name__} have no "
            "values (they are on the meta device). Load a checkpoint with load_checkpoint_and_dispatch."
        )
    data |= _written(seats, data, path, files)
    for seat in seats:
        new = data.get(seat.name)
        tensor = seat.place.tensor if new is None else new
        if tensor.device != seat.home:
            tensor = new = tensor.detach().to(seat.home)
        if new is not None:
            seat.place.put(new)


def _given(seats: list[TensorPlacement], state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    given = {}
    for seat in seats:
        name = next((name for name in seat.place.names if name in state_dict), None)
        if name is None:
            continue
        value = state_dict[name].detach()
        if value.shape != seat.place.tensor.shape:
            raise ConfigError(
                f"state_dict has {shown(name)} of shape {tuple(value.shape)}, the model of "
                f"{tuple(seat.place.tensor.shape)}. Pass weights of this model."
            )
        given[seat.name] = value.to(seat.home)
    return given


def _found(
    seats: list[TensorPlacement],
    state_dict: Mapping[str, torch.Tensor],
    folder: str | None,
    index: Mapping[str, Mapping[str, Any]] | None,
    files: MappedFiles,
) -> dict[str, torch.Tensor]:
    """Tensors without values that the folder has; of the disk, all that ``index`` has."""
    wanted = {
        seat.name: seat
        for seat in seats
        if (seat.place.tensor.is_meta or (index is not None and seat.on_disk))
        and not state_dict.keys() & set(seat.place.names)
    }
    if not wanted:
        return {}
    entries = index if index is not None else index_of(folder) if folder is not None else {}
    names = {seat.name: next((n for n in seat.place.names if n in entries), None) for seat in wanted.values()}
    regions = regions_of({name: entries[name] for name in names.values() if name is not None}, folder)
    found = {}
    for own, name in names.items():
        if name is not None:
            _check_fits(wanted[own], regions[name])
            mapped = regions[name].mapped(files)
            found[own] = read(regions[name], files, regions[name].dtype) if mapped is None else mapped
    return found


def _check_fits(seat: TensorPlacement, region: FileRegion) -> None:
    if (region.shape, region.dtype) != (seat.place.tensor.shape, seat.place.tensor.dtype):
        raise OffloadError(
            f"{region.path} holds {shown(seat.name)} as {region.dtype} of shape {tuple(region.shape)}, but the model "
            f"needs {seat.place.tensor.dtype} of shape {tuple(seat.place.tensor.shape)}. Name another folder, or "
            "build the model with that dtype."
        )


def _written(
    seats: list[TensorPlacement], data: Mapping[str, torch.Tensor], folder: str | None, files: MappedFiles
) -> dict[str, torch.Tensor]:
    """Tensors of the disk that no file has, written to the folder."""
    backed = FileBacked.now()
    new = [
        (seat, tensor)
        for seat in seats
        if seat.on_disk
        and (tensor := data.get(seat.name, seat.place.tensor)).numel()
        and not backed.holds(tensor)
    ]
    if not new:
        return {}
    if folder is None:
        names = ", ".join(shown(seat.name) for seat, _ in new[:5]) + " and others" * (len(new) > 5)
        raise ConfigError(
            f"{names} are placed on the disk, but no file has them. Pass offload_dir (offload_folder), a folder to "
            "write them to."
        )
    kept = [
        Kept(seat.name, tensor.dtype, tensor.shape, partial(pieces_on_cpu, tensor)) for seat, tensor in new
    ]
    mapped = {name: (region.mapped(files), region) for name, region in keep(folder, kept).items()}
    return {
        name: read(region, files, region.dtype) if tensor is None else tensor
        for name, (tensor, region) in mapped.items()
    }
