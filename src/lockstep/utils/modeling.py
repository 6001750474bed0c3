"""Names that scripts import from ``accelerate.utils.modeling``: device maps, and weights that are loaded by them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.config.enums import DistributedType
from lockstep.config.values import bytes_of
from lockstep.offload.device_map.infer import infer_auto_device_map
from lockstep.offload.device_map.memory import (
    compute_module_sizes,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
)
from lockstep.offload.device_map.placement import check_device_map, find_tied_parameters
from lockstep.offload.dispatch.loading import load_checkpoint_in_model
from lockstep.offload.dispatch.storage import (
    align_module_device,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from lockstep.offload.files.offload_folder import regions_of
from lockstep.offload.files.stored import MappedFiles
from lockstep.parallel.parallel_model import unwrap
from lockstep.runtime import process
from lockstep.runtime.available import is_peft_available
from lockstep.utils.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from lockstep.utils.module_tensors import (
    dtype_byte_size,
    get_non_persistent_buffers,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from lockstep.utils.offload import read_region

DevicePlace = TypeVar("DevicePlace")

__all__ = [
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_NAME",
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_grad_scaler",
    "get_max_layer_size",
    "get_max_memory",
    "get_non_persistent_buffers",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "infer_auto_device_map",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size as a number of bytes.

    Args:
        size: A number of bytes, or a text such as ``"5GB"`` (powers of 1000) or ``"200MiB"`` (powers of 1024).

    Raises:
        ValueError: the text is not a size.

    Examples:
        ```python
        from lockstep.utils import convert_file_size_to_int

        assert convert_file_size_to_int("1KB") == 1000 and convert_file_size_to_int("1KiB") == 1024
        ```
    """
    return bytes_of(size, "size")


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a transformers ``model`` ties weights, such as embeddings and the head.

    Examples:
        ```python
        import torch
        from lockstep.utils import check_tied_parameters_in_config

        assert not check_tied_parameters_in_config(torch.nn.Linear(4, 1))  # not one of transformers
        ```
    """
    config = getattr(model, "config", None)
    if config is None:
        return False
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    words = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None  # type: ignore[operator]
    if words and getattr(text, "tie_word_embeddings", False):
        return True
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False):
        return True
    return any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Iterable[str]], device_map: Mapping[str, object]
) -> None:
    """Warn if a device map places tied weights on several devices.

    Args:
        tied_params: Groups of names, from ``find_tied_parameters``.
        device_map: Name of a module or tensor -> device.

    Examples:
        ```python
        from lockstep.utils import check_tied_parameters_on_same_device

        ties = [["embed.weight", "head.weight"]]
        check_tied_parameters_on_same_device(ties, {"embed": 0, "head": 0})  # no warning
        check_tied_parameters_on_same_device(ties, {"embed": 0, "head": "cpu"})  # warns
        ```
    """
    for names in tied_params:
        places = {name: _place_of(name, device_map) for name in names}
        if len(set(map(str, places.values()))) > 1:
            warnings.warn(
                f"Tied parameters are on different devices: {places}. Place them on one device in the device map.",
                stacklevel=2,
            )


def _place_of(name: str, device_map: Mapping[str, object]) -> Any:
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def clean_device_map(
    device_map: MutableMapping[str, DevicePlace], module_name: str = ""
) -> MutableMapping[str, DevicePlace]:
    """Join the entries of modules whose parts are all on one device, in place, and return the device map.

    Args:
        device_map: Name of a module or tensor -> device.
        module_name: The module whose entries are joined. ``""``: the whole model.

    Examples:
        ```python
        from lockstep.utils import clean_device_map

        device_map = clean_device_map({"layers.0": 0, "layers.1": 0, "head": "cpu"})
        assert device_map == {"layers": 0, "head": "cpu"}
        ```
    """
    prefix = f"{module_name}." if module_name else ""
    below = [name for name in device_map if name.startswith(prefix)]
    places = [device_map[name] for name in below]
    if len(below) > 1 and all(place == places[0] for place in places):
        for name in below:
            del device_map[name]
        device_map[module_name] = places[0]
        return device_map
    for child in dict.fromkeys(prefix + name[len(prefix) :].partition(".")[0] for name in below):
        if child != module_name and any(name.startswith(f"{child}.") for name in below):
            clean_device_map(device_map, child)
    return device_map


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of ``model``, and a pair: the bytes of its largest layer, and the names of layers of that
    size.

    Examples:
        ```python
        import torch
        from lockstep.utils import calculate_maximum_sizes

        model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 1, bias=False))
        assert calculate_maximum_sizes(model) == (440, (400, ["0"]))
        ```
    """
    sizes = compute_module_sizes(model)
    undivided = getattr(model, "_no_split_modules", None) or []
    parts = [*model.named_parameters(recurse=False), *model.named_children()]
    return sizes[""], get_max_layer_size(parts, sizes, undivided)  # type: ignore[arg-type]


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, object]] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Put the weights of an offload folder into a model, on the CPU.

    Args:
        model: The model, which is changed in place.
        index: Name of a weight -> its entry in the folder's ``index.json``. Empty or None: nothing happens.
        offload_folder: The folder.

    Examples:
        ```python
        import json
        import torch
        from lockstep import init_empty_weights
        from lockstep.utils import load_offloaded_weights, offload_state_dict

        offload_state_dict("stored_layer", {"weight": torch.ones(1, 4), "bias": torch.zeros(1)})
        with init_empty_weights():
            layer = torch.nn.Linear(4, 1)
        with open("stored_layer/index.json") as file:
            load_offloaded_weights(layer, json.load(file), "stored_layer")
        assert layer(torch.ones(1, 4)).item() == 4
        ```
    """
    if not index:
        return
    files = MappedFiles()
    for name, region in regions_of(index, os.fspath(offload_folder)).items():
        set_module_tensor_to_device(model, name, "cpu", value=read_region(region, files))


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, object] | None = None
) -> dict[str, torch.Tensor]:
    """Read the tensors of a file: name -> tensor.

    Args:
        checkpoint_file: A ``.safetensors`` file, or a file that ``torch.save`` wrote. No code in it is run.
        device_map: Name of a module or tensor -> device. Tensors that it does not name, or places on the disk, go to
            the CPU. None: all do.

    Examples:
        ```python
        import torch
        from safetensors.torch import save_file
        from lockstep.utils import load_state_dict

        save_file({"weight": torch.ones(2)}, "two_weights.safetensors")
        assert load_state_dict("two_weights.safetensors")["weight"].tolist() == [1, 1]
        ```
    """
    path = os.fspath(checkpoint_file)
    if not path.endswith(".safetensors"):
        loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    else:
        from safetensors.torch import load_file

        loaded = load_file(path)
    if device_map is None:
        return loaded
    places = {name: _place_of(name, device_map) for name in loaded}
    return {
        name: value if places[name] in (None, "cpu", "disk") else value.to(places[name])
        for name, value in loaded.items()
    }


def is_peft_model(model: object) -> bool:
    """Return whether ``model``, or the model inside of its wrappers, is one of the package peft.

    Examples:
        ```python
        import torch
        from lockstep.utils import is_peft_model

        assert not is_peft_model(torch.nn.Linear(4, 1))
        ```
    """
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(unwrap(model, keep_compile=False) if isinstance(model, nn.Module) else model, PeftModel)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a ``torch.amp.GradScaler`` for this process's device.

    Args:
        distributed_type: Ignored: sharded models need no other class here.
        kwargs: Arguments of ``torch.amp.GradScaler``.

    Examples:
        ```python
        from lockstep.utils import get_grad_scaler

        assert get_grad_scaler(init_scale=1024.0).get_scale() == 1024.0
        ```
    """
    return torch.amp.GradScaler(process.start_runtime().device.type, **kwargs)
