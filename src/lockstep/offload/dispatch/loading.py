"""Match weights in files with those of a model, and load them: mapped where they can be, else one tensor at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lockstep.config.values import join_names, repr_short
from lockstep.errors import CheckpointError, ConfigError
from lockstep.offload.device_map.memory import dtype_of, is_converted
from lockstep.offload.device_map.placement import (
    CPU,
    TensorPlacement,
    TensorRef,
    assign_placements,
    check_device_map,
    main_device_of,
    tensor_refs,
)
from lockstep.offload.files.checkpoint_files import stored_tensors
from lockstep.offload.files.offload_folder import TensorToWrite, write_to_folder
from lockstep.offload.files.stored import MappedFiles, Stored, converted, read
from lockstep.torch_internals import modules as torch_modules

logger = logging.getLogger(__name__)

_EXTRA_STATE = torch_modules.EXTRA_STATE


def match(
    model: nn.Module, refs: list[TensorRef], stored: Mapping[str, Stored], strict: bool, origin: str
) -> dict[str, Stored]:
    """Return name of a place -> its tensor in the checkpoint. A tied parameter takes that of its first name that is
    there.

    Keys of a transformers model without its head fit one with it, and the other way round.

    Raises:
        CheckpointError: a shape differs; a tensor without values is not in the checkpoint; with ``strict`` any
            persistent tensor that is not there, or any key that the model does not have.
    """
    known = {name for ref in refs if ref.is_persistent for name in ref.names}
    prefix = getattr(model, "base_model_prefix", "")
    by_name: dict[str, Stored] = {}
    unexpected = []
    for key, tensor in stored.items():
        name = _name_in_model(key, known, prefix if isinstance(prefix, str) else "")
        if name is None:
            unexpected += [key] if not key.endswith(_EXTRA_STATE) else []
        elif name not in by_name or name == key:
            # A key that is a name of the model itself wins over one that fits with or without the prefix.
            by_name[name] = tensor
    # Backwards: the first name is the last to be entered.
    found = {ref.name: by_name[name] for ref in refs for name in ref.names[::-1] if name in by_name}
    missing = [ref for ref in refs if ref.is_persistent and ref.name not in found]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{origin} and {type(model).__name__} do not have the same weights: missing "
            f"{_quoted_names(ref.name for ref in missing)}; unexpected {_quoted_names(unexpected)}. "
            "Pass strict=False to load what fits."
        )
    empty = [ref.name for ref in refs if ref.name not in found and ref.tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{origin} does not have {_quoted_names(empty)}, which have no values in the model either. Load "
            "another checkpoint, tie weights first (model.tie_weights()), or build the model with values for "
            "buffers (include_buffers=False)."
        )
    _check_shapes(model, refs, found, origin)
    if unexpected:
        logger.warning(
            "%s has weights that were not loaded, because %s has no weights of these names: %s.",
            origin,
            type(model).__name__,
            _quoted_names(unexpected, 20),
        )
    if missing:
        names = _quoted_names((ref.name for ref in missing), 20)
        logger.warning("%s does not have %s, so these weights keep the values that they have.", origin, names)
    return found


def loaded_dtype(
    ref: TensorRef, stored: Stored, dtype: torch.dtype | None, in_fp32: Iterable[str]
) -> torch.dtype:
    """Return what a tensor becomes: ``dtype`` if it is of floating point, else what the model has.

    ``in_fp32``: parts of names that are float32 where float16 is asked for.
    """
    if dtype is None or not is_converted(ref.tensor.dtype) or not is_converted(stored.dtype):
        return ref.tensor.dtype
    if dtype == torch.float16 and any(key == ref.name or f"{key}." in ref.name for key in in_fp32):
        return torch.float32
    return dtype


def _name_in_model(key: str, known: set[str], prefix: str) -> str | None:
    if key in known:
        return key
    if not prefix:
        return None
    candidates = (f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
    return next((name for name in candidates if name in known), None)


def _check_shapes(model: nn.Module, refs: list[TensorRef], found: Mapping[str, Stored], origin: str) -> None:
    wrong = [
        f"{ref.name} is {tuple(found[ref.name].shape)} there and {tuple(ref.tensor.shape)} in the model"
        for ref in refs
        if ref.name in found and found[ref.name].shape != ref.tensor.shape
    ]
    if wrong:
        raise CheckpointError(
            f"{origin} does not fit {type(model).__name__}: {join_names(wrong, separator='; ')}. Build the model "
            "from the configuration that the checkpoint was made with."
        )


def _quoted_names(names: Iterable[str], limit: int = 5) -> str:
    return join_names((repr_short(name, 80) for name in names), limit)


StrPath = str | os.PathLike[str]


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: StrPath,
    device_map: Mapping[str, object] | None = None,
    offload_folder: StrPath | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, each tensor to the device that a device map tells.

    Tensors for the CPU and the disk are mapped from safetensors files. They take memory only when they are used.
    Changes of their values do not reach the file. Other tensors are read one at a time. Everything is checked before
    the model is changed. Call ``dispatch_model`` afterwards if the map has several devices.

    Args:
        model: The model. Its tensors may be on the meta device.
        checkpoint: A ``.safetensors`` or ``.bin`` file, the index of shards, or a folder with either.
        device_map: Name of a module or tensor -> device. None: parameters stay on their devices, and those without
            values come to the CPU.
        offload_folder: The folder to which tensors for the disk are written that cannot be mapped from the
            checkpoint, because their dtype differs or because they are not in a safetensors file.
        dtype: The dtype that floating-point tensors get. None: that of the model.
        offload_state_dict: Accepted, without effect: tensors are read one at a time.
        offload_buffers: Whether buffers of modules on the disk stay there, too.
        keep_in_fp32_modules: Parts of names of tensors that become float32 if ``dtype`` is float16.
        offload_8bit_bnb: True is refused: weights of 8 bits are not offloaded.
        strict: Whether checkpoint and model must have the same tensors.
        full_state_dict: False is refused: each process maps the files itself.
        broadcast_from_rank0: True is refused, for the same reason.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, does not fit the model, or lacks a tensor that has no
            values in the model either.
        ConfigError: the device map or another argument is wrong.
        OffloadError: ``offload_folder`` is full or has other weights.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, init_empty_weights
        from lockstep.utils import load_checkpoint_in_model

        accelerator = Accelerator()
        accelerator.save_model(torch.nn.Linear(4, 1), "weights_to_load")
        accelerator.wait_for_everyone()
        with init_empty_weights():
            model = torch.nn.Linear(4, 1)  # takes no memory
        load_checkpoint_in_model(model, "weights_to_load", device_map={"": "cpu"})
        assert model(torch.randn(2, 4)).shape == (2, 1)
        ```
    """
    _refuse(offload_8bit_bnb, full_state_dict, broadcast_from_rank0)
    wanted = dtype_of(dtype)
    if device_map is None:
        placements = _where_they_are(model)
    else:
        check_device_map(model, device_map)
        placements = assign_placements(model, device_map, main_device_of(device_map), offload_buffers)
    stored = match(
        model,
        [placement.ref for placement in placements],
        stored_tensors(checkpoint),
        strict,
        os.fspath(checkpoint),
    )
    loads = [
        _TensorLoad(
            placement,
            stored[placement.name],
            loaded_dtype(placement.ref, stored[placement.name], wanted, keep_in_fp32_modules or ()),
        )
        for placement in placements
        if placement.name in stored
    ]
    for load, data in _prepared(loads, offload_folder, in_place=device_map is None):
        load.placement.ref.replace(data)


@dataclass(frozen=True)
class _TensorLoad:
    """A tensor of the checkpoint, and where it goes."""

    placement: TensorPlacement
    stored: Stored
    dtype: torch.dtype

    def pieces(self, files: MappedFiles) -> Iterator[torch.Tensor]:
        return converted(self.stored.pieces(files), self.dtype)


def _prepared(
    loads: list[_TensorLoad], folder: StrPath | None, in_place: bool
) -> list[tuple[_TensorLoad, torch.Tensor]]:
    """Return the data of each tensor; nothing of the model changes, except that with ``in_place`` what has
    values there.
    """
    files = MappedFiles()
    mapped: dict[int, torch.Tensor] = {}
    for load in loads:
        # All files first: then the kernel is asked only once for this process's mappings.
        data = load.stored.mapped(files)
        if data is not None and _is_mappable(load):
            mapped[id(load)] = data
    rewritten = [load for load in loads if load.placement.on_disk and id(load) not in mapped]
    if rewritten:
        mapped |= _rewritten(rewritten, folder, files)
    prepared = []
    for load in loads:
        old = load.placement.ref.tensor
        if in_place and not old.is_meta and old.dtype == load.dtype:
            with torch.no_grad():
                old.copy_(read(load.stored, files, load.dtype))
        elif id(load) in mapped:
            prepared.append((load, mapped[id(load)]))
        else:
            prepared.append((load, read(load.stored, files, load.dtype, load.placement.device)))
    return prepared


def _is_mappable(load: _TensorLoad) -> bool:
    if load.placement.device != CPU or load.stored.dtype != load.dtype:
        return False
    # Buffers are written to in training, and are small.
    return load.placement.ref.is_parameter or load.placement.on_disk


def _rewritten(
    loads: list[_TensorLoad], folder: StrPath | None, files: MappedFiles
) -> dict[int, torch.Tensor]:
    if folder is None:
        load = loads[0]
        why = (
            f"is stored as {load.stored.dtype} and becomes {load.dtype}"
            if load.stored.dtype != load.dtype
            else "is not in a safetensors file, or not aligned there"
        )
        raise ConfigError(
            f"device_map places '{load.placement.name}' on the disk, but it {why}, so it has to be written to "
            "another file. Pass offload_folder, or the dtype of the checkpoint."
        )
    kept = [
        TensorToWrite(
            load.placement.name,
            load.dtype,
            load.placement.ref.tensor.shape,
            partial(load.pieces, files),
            f"{load.stored.source} {load.dtype}",
        )
        for load in loads
    ]
    regions = write_to_folder(os.fspath(folder), kept)
    mapped = {}
    for load in loads:
        region = regions[load.placement.name]
        data = region.mapped(files)
        mapped[id(load)] = read(region, files, region.dtype) if data is None else data
    return mapped


def _where_they_are(model: nn.Module) -> list[TensorPlacement]:
    placements = []
    for ref in tensor_refs(model):
        device = CPU if ref.tensor.is_meta else ref.tensor.device
        placements.append(TensorPlacement(ref, device, False, device))
    return placements


def _refuse(offload_8bit_bnb: bool, full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    if offload_8bit_bnb:
        raise ConfigError(
            "offload_8bit_bnb=True asks for weights of 8 bits outside of the device, which is not supported. Leave "
            "it out, and load the model by transformers' BitsAndBytesConfig onto a device that has room for it."
        )
    if broadcast_from_rank0 or not full_state_dict:
        raise ConfigError(
            "broadcast_from_rank0=True and full_state_dict=False are not supported: each process maps the files "
            "itself, and the processes of one machine share the memory. Leave both arguments out."
        )
