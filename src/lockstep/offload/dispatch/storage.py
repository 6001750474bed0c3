"""Where the weights of a placed model are at rest: brought there, read and written from there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from lockstep.config.values import repr_short
from lockstep.errors import ConfigError, OffloadError, UsageError
from lockstep.offload.device_map.placement import TensorPlacement, like
from lockstep.offload.dispatch.align_hooks import AlignDevicesHook
from lockstep.offload.dispatch.attach import OFFLOADED
from lockstep.offload.dispatch.loading import StrPath
from lockstep.offload.files.offload_folder import TensorToWrite, index_of, regions_of, write_to_folder
from lockstep.offload.files.pages import file_mappings, is_in_file
from lockstep.offload.files.stored import FileRegion, MappedFiles, pieces_on_cpu, read
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import tensors as torch_tensors


def place_tensors(
    model: nn.Module,
    placements: list[TensorPlacement],
    state_dict: Mapping[str, torch.Tensor] | None,
    folder: StrPath | None,
    index: Mapping[str, Mapping[str, object]] | None,
) -> None:
    """Put every tensor where its placement says.

    Raises:
        ConfigError: a tensor is to be on the disk, but no folder is given; or one of ``state_dict`` does not fit.
        OffloadError: the folder cannot be written or holds other weights.
        UsageError: a tensor has no values.
    """
    path = None if folder is None else os.fspath(folder)
    files = MappedFiles()
    data = _given(placements, state_dict or {}) | _found(placements, state_dict or {}, path, index, files)
    empty = [
        placement.name
        for placement in placements
        if placement.ref.tensor.is_meta and placement.name not in data
    ]
    if empty:
        raise UsageError(
            f"{', '.join(map(repr_short, empty[:5]))}{' and others' * (len(empty) > 5)} of {type(model).__name__} have "
            "no values (they are on the meta device). Load a checkpoint with load_checkpoint_and_dispatch."
        )
    data |= _written(placements, data, path, files)
    # Only now, when all data is there, is anything of the model replaced.
    for placement in placements:
        new = data.get(placement.name)
        tensor = placement.ref.tensor if new is None else new
        if tensor.device != placement.device:
            tensor = new = tensor.detach().to(placement.device)
        if new is not None:
            placement.ref.replace(new)


def _given(
    placements: list[TensorPlacement], state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    given = {}
    for placement in placements:
        name = next((name for name in placement.ref.names if name in state_dict), None)
        if name is None:
            continue
        value = state_dict[name].detach()
        if value.shape != placement.ref.tensor.shape:
            raise ConfigError(
                f"state_dict has {repr_short(name)} of shape {tuple(value.shape)}, but in the model its shape is "
                f"{tuple(placement.ref.tensor.shape)}. Pass weights of this model."
            )
        given[placement.name] = value.to(placement.device)
    return given


def _found(
    placements: list[TensorPlacement],
    state_dict: Mapping[str, torch.Tensor],
    folder: str | None,
    index: Mapping[str, Mapping[str, object]] | None,
    files: MappedFiles,
) -> dict[str, torch.Tensor]:
    """Tensors without values that the folder has; of the disk, all that ``index`` has."""
    wanted = {
        placement.name: placement
        for placement in placements
        if (placement.ref.tensor.is_meta or (index is not None and placement.on_disk))
        and not state_dict.keys() & set(placement.ref.names)
    }
    if not wanted:
        return {}
    entries = index if index is not None else index_of(folder) if folder is not None else {}
    names = {own: next((n for n in one.ref.names if n in entries), None) for own, one in wanted.items()}
    regions = regions_of({name: entries[name] for name in names.values() if name is not None}, folder)
    found = {}
    for own, name in names.items():
        if name is not None:
            _check_fits(wanted[own], regions[name])
            mapped = regions[name].mapped(files)
            found[own] = read(regions[name], files, regions[name].dtype) if mapped is None else mapped
    return found


def _check_fits(placement: TensorPlacement, region: FileRegion) -> None:
    tensor = placement.ref.tensor
    if (region.shape, region.dtype) != (tensor.shape, tensor.dtype):
        raise OffloadError(
            f"{region.path} holds {repr_short(placement.name)} as {region.dtype} of shape {tuple(region.shape)}, but "
            f"the model needs {tensor.dtype} of shape {tuple(tensor.shape)}. Name another folder, or build the model "
            "with that dtype."
        )


def _written(
    placements: list[TensorPlacement],
    data: Mapping[str, torch.Tensor],
    folder: str | None,
    files: MappedFiles,
) -> dict[str, torch.Tensor]:
    """Tensors of the disk that no file has, written to the folder."""
    mappings = file_mappings()
    new = [
        (placement, tensor)
        for placement in placements
        if placement.on_disk
        and (tensor := data.get(placement.name, placement.ref.tensor)).numel()
        and not is_in_file(tensor, mappings)
    ]
    if not new:
        return {}
    if folder is None:
        names = ", ".join(repr_short(placement.name) for placement, _ in new[:5]) + " and others" * (
            len(new) > 5
        )
        raise ConfigError(
            f"{names} are placed on the disk, but no file has them. Pass offload_dir (offload_folder), the "
            "folder to write them to."
        )
    kept = [
        TensorToWrite(placement.name, tensor.dtype, tensor.shape, partial(pieces_on_cpu, tensor))
        for placement, tensor in new
    ]
    mapped = {name: (region.mapped(files), region) for name, region in write_to_folder(folder, kept).items()}
    return {
        name: read(region, files, region.dtype) if tensor is None else tensor
        for name, (tensor, region) in mapped.items()
    }


def offload_state_dict(save_dir: StrPath, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to an offload folder. ``dispatch_model`` and ``disk_offload`` read them from there.

    Args:
        save_dir: The folder. It is made if it does not exist.
        state_dict: Name -> tensor of any shape.

    Raises:
        OffloadError: the folder is full, cannot be written, or has other values under one of the names.

    Examples:
        ```python
        import torch
        from lockstep import disk_offload, init_empty_weights
        from lockstep.utils import offload_state_dict

        offload_state_dict("offload", {"weight": torch.ones(1, 4), "bias": torch.zeros(1)})
        with init_empty_weights():
            model = torch.nn.Linear(4, 1)
        disk_offload(model, "offload", execution_device="cpu")  # finds its weights in the folder
        assert model(torch.ones(1, 4)).item() == 4
        ```
    """
    write_to_folder(
        os.fspath(save_dir),
        [
            TensorToWrite(name, tensor.dtype, tensor.shape, partial(pieces_on_cpu, tensor))
            for name, tensor in state_dict.items()
        ],
    )


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of ``model`` with all tensors on the CPU. Weights on the disk stay mapped from their
    files.

    Examples:
        ```python
        import torch
        from lockstep import disk_offload
        from lockstep.utils import get_state_dict_offloaded_model

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        weight = model[0].weight.detach().clone()
        disk_offload(model, "offloaded_state", execution_device="cpu")
        assert torch.equal(get_state_dict_offloaded_model(model)["0.weight"], weight)
        ```
    """
    return {
        name: value.detach().to("cpu") if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether parameters of ``module`` itself are brought from the CPU or the disk when it is used.

    Examples:
        ```python
        import torch
        from lockstep import disk_offload
        from lockstep.utils import has_offloaded_params

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        assert not has_offloaded_params(model[0])
        disk_offload(model, "offloaded_params", execution_device="cpu")
        assert has_offloaded_params(model[0])
        ```
    """
    hook = module.__dict__.get("_hf_hook")
    return OFFLOADED in module.__dict__ or (isinstance(hook, AlignDevicesHook) and hook.offload)


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: torch.device | str | int | None = None
) -> Iterator[None]:
    """Put the parameters of a module on a device inside of the block. Changes of their values are kept afterwards.

    Args:
        module: The module. Modules below it are left alone.
        execution_device: The device. None: the parameters stay where they are.

    Examples:
        ```python
        import torch
        from lockstep.utils import align_module_device

        layer = torch.nn.Linear(4, 1)
        with align_module_device(layer, "cpu"):  # or 0, the first GPU
            layer.weight.data.zero_()
        assert layer.weight.abs().sum() == 0  # what was written inside is kept
        ```
    """
    if execution_device is None:
        yield
        return
    device = torch.device(execution_device)
    moved = {}
    for key, parameter in torch_modules.parameters_of(module).items():
        if parameter is not None and parameter.device != device:
            there = like(parameter, parameter.detach().to(device))
            # The version counter tells later whether somebody has written to the copy.
            moved[key] = (parameter, there, torch_tensors.version(there))
    try:
        for key, (_, there, _) in moved.items():
            torch_modules.parameters_of(module)[key] = there
        yield
    finally:
        for key, (parameter, there, version) in moved.items():
            torch_modules.parameters_of(module)[key] = parameter
            if torch_tensors.version(there) != version:
                with torch.no_grad():
                    parameter.copy_(there)
