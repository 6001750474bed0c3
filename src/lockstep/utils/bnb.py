"""Names that scripts import from ``accelerate.utils.bnb``: linear layers of 8 or 4 bits by the package bitsandbytes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.comm.tree import Kwargs
from lockstep.errors import ConfigError, UsageError
from lockstep.offload.device_map.infer import infer_auto_device_map
from lockstep.offload.device_map.memory import get_balanced_memory
from lockstep.offload.device_map.placement import find_tied_parameters
from lockstep.offload.dispatch.align_hooks import AlignDevicesHook
from lockstep.offload.dispatch.empty import init_empty_weights
from lockstep.offload.dispatch.loading import load_checkpoint_in_model
from lockstep.offload.dispatch.module_hooks import add_hook_to_module
from lockstep.utils.dataclasses import BnbQuantizationConfig
from lockstep.utils.imports import is_4bit_bnb_available, is_8bit_bnb_available
from lockstep.utils.module_tensors import set_module_tensor_to_device
from lockstep.utils.offload import offload_weight

__all__ = [
    "get_keys_to_not_convert",
    "get_parameter_device",
    "get_quantized_model_device_map",
    "has_4bit_bnb_layers",
    "load_and_quantize_model",
    "quantize_and_offload_8bit",
    "replace_with_bnb_layers",
]

WORDS = ("auto", "balanced", "balanced_low_0", "sequential")


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: object = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: object = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Return a model whose linear layers are quantised to 8 or 4 bits by the package bitsandbytes.

    A model that has values is quantised when it is moved to the accelerator, and only ``bnb_quantization_config``
    counts. The other arguments are for a model on the meta device.

    Args:
        model: The model, which is changed in place.
        bnb_quantization_config: How layers are quantised.
        weights_location: The checkpoint: a file, the index of shards, or a folder.
        device_map: As in ``get_quantized_model_device_map``.
        no_split_module_classes: Names of classes of modules that stay whole.
        max_memory: Device -> bytes, as in ``get_max_memory``.
        offload_folder: Accepted, without effect: quantised layers are not offloaded.
        offload_state_dict: Accepted, without effect: tensors are read one at a time.

    Raises:
        ImportError: bitsandbytes for 8 bits is not installed.
        ValueError: bitsandbytes for 4 bits is not installed, or layers would be on the CPU or the disk.
        RuntimeError: there is no accelerator, or the model is on the meta device and ``weights_location`` is None.

    Examples:
        ```python
        import torch
        from lockstep.utils import BnbQuantizationConfig, load_and_quantize_model

        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        model = load_and_quantize_model(model, BnbQuantizationConfig(load_in_8bit=True))  # on a GPU
        ```
    """
    config = bnb_quantization_config
    _check_package(config)
    whole = list(config.skip_modules or get_keys_to_not_convert(model))
    if config.load_in_4bit and isinstance(device_map, Mapping) and len(device_map) > 1:
        whole += [name for name, device in device_map.items() if device in ("cpu", "disk")]
    whole += config.keep_in_fp32_modules or []
    config.skip_modules = whole
    named: Any = model
    named.is_loaded_in_4bit, named.is_loaded_in_8bit = config.load_in_4bit, config.load_in_8bit
    if get_parameter_device(model).type != "meta":
        device = _accelerator()
        model = replace_with_bnb_layers(model, config, whole)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if any(kept in name for kept in config.keep_in_fp32_modules or ()):
                parameter.data = parameter.data.to(torch.float32)
            elif parameter.is_floating_point():
                parameter.data = parameter.data.to(config.torch_dtype)
        return model.to(device)
    if weights_location is None:
        raise UsageError(
            "The model is on the meta device, but weights_location is missing. Pass the file or folder of its "
            "checkpoint."
        )
    with init_empty_weights():
        model = replace_with_bnb_layers(model, config, whole)
    placed = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    away = [name for name, device in placed.items() if device in ("cpu", "disk")]
    if away and config.load_in_8bit and torch.accelerator.is_available():
        raise ConfigError(
            f"{', '.join(away[:3])} would be on the CPU or the disk, but layers of 8 bits cannot be offloaded. "
            "Give the accelerators more memory."
        )
    load_checkpoint_in_model(
        model, weights_location, dtype=config.torch_dtype, keep_in_fp32_modules=config.keep_in_fp32_modules
    )
    return _placed(model, placed)


def _placed(model: nn.Module, device_map: Mapping[str, int | str | torch.device]) -> nn.Module:
    """Modules on their devices, where they are quantised; inputs follow where there are several devices."""
    spread = len(set(device_map.values())) > 1
    for name, device in device_map.items():
        part = model.get_submodule(name).to(device)
        if spread:
            add_hook_to_module(part, AlignDevicesHook(execution_device=device))
    if spread:
        add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    named: Any = model
    named.hf_device_map = dict(device_map)
    return model


def _check_package(config: BnbQuantizationConfig) -> None:
    message = "needs the package 'bitsandbytes'. Install it with: pip install bitsandbytes"
    if config.load_in_8bit and not is_8bit_bnb_available():
        raise ImportError(f"load_in_8bit=True {message}")
    if config.load_in_4bit and not is_4bit_bnb_available():
        raise ConfigError(f"load_in_4bit=True {message}")


def _accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise UsageError(
            "Quantised layers need an accelerator, but this machine has none. Use a machine with a GPU, or load "
            "the model as it is."
        )
    return torch.device(found.type, torch.accelerator.current_device_index())


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: Any = None,
    max_memory: Any = None,
    no_split_module_classes: list[str] | None = None,
) -> dict[str, Any]:
    """Choose a device for each module of a model that will be quantised.

    Args:
        model: The model. Its tensors may be on the meta device.
        bnb_quantization_config: How layers are quantised.
        device_map: ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, or a mapping, which is
            checked. None: all modules go to this process's accelerator.
        max_memory: Device -> bytes, as in ``get_max_memory``.
        no_split_module_classes: Names of classes of modules that stay whole.

    Returns:
        Name of a module or tensor -> device.

    Raises:
        RuntimeError: ``device_map`` is None, and there is no accelerator.
        ValueError: ``device_map`` is another word, or layers of 4 bits would be on the CPU or the disk.

    Examples:
        ```python
        import torch
        from lockstep.utils import BnbQuantizationConfig, get_quantized_model_device_map

        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        config = BnbQuantizationConfig(load_in_8bit=True)
        placed = get_quantized_model_device_map(model, config, "auto", max_memory={0: "1GB", "cpu": "1GB"})
        assert placed == {"": 0}
        ```
    """
    config = bnb_quantization_config
    if device_map is None:
        return {"": _accelerator()}
    whole, exact = config.skip_modules or [], config.keep_in_fp32_modules or []
    if isinstance(device_map, str):
        if device_map not in WORDS:
            raise ConfigError(
                f"device_map is {device_map!r}, but must be one of {', '.join(WORDS)}, or a mapping. Pass one of "
                "these."
            )
        names = [name for name, _ in model.named_parameters()]
        special = {name: config.torch_dtype for name in names if any(part in name for part in whole)}
        special |= {name: torch.float32 for name in names if any(part in name for part in exact)}
        options: Kwargs = {
            "special_dtypes": special,
            "no_split_module_classes": no_split_module_classes,
            "dtype": config.target_dtype,
        }
        if device_map != "sequential":
            max_memory = get_balanced_memory(
                model, max_memory, low_zero=device_map == "balanced_low_0", **options
            )
        device_map = infer_auto_device_map(model, max_memory=max_memory, **options)
    away = [
        name
        for name, device in device_map.items()
        if device in ("cpu", "disk") and name not in (*whole, *exact)
    ]
    if away and config.load_in_4bit:
        raise ConfigError(
            f"{', '.join(away[:3])} would be on the CPU or the disk, where layers of 4 bits cannot compute. Give the "
            "accelerator more memory, or name these modules in skip_modules."
        )
    return dict(device_map)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Collection[str] | None = None,
    current_key_name: list[str] | None = None,
) -> nn.Module:
    """Replace the linear layers of a model by bitsandbytes' layers, in place, and return the model.

    The new layers have the values of the old ones. They are quantised when the model is moved to an accelerator.

    Args:
        model: The model.
        bnb_quantization_config: How layers are quantised.
        modules_to_not_convert: Names of modules that stay as they are, with all below them.
        current_key_name: Names of the modules around ``model``, outermost first. None: it is the whole model.

    Examples:
        ```python
        import torch
        from lockstep.utils import BnbQuantizationConfig, replace_with_bnb_layers

        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        model = replace_with_bnb_layers(model, BnbQuantizationConfig(load_in_8bit=True), modules_to_not_convert=["1"])
        ```
    """
    import bitsandbytes

    config, whole = bnb_quantization_config, set(modules_to_not_convert or ())
    prefix = ".".join(current_key_name or ())
    linear = {
        name: module
        for name, module in model.named_modules()
        if name
        and isinstance(module, nn.Linear)
        and not _stays(f"{prefix}.{name}" if prefix else name, whole)
    }
    for name, module in linear.items():
        has_bias = module.bias is not None
        made: Any
        if config.load_in_8bit:
            made = bitsandbytes.nn.Linear8bitLt(
                module.in_features,
                module.out_features,
                has_bias,
                has_fp16_weights=False,
                threshold=config.llm_int8_threshold,
            )
        else:
            made = bitsandbytes.nn.Linear4bit(
                module.in_features,
                module.out_features,
                has_bias,
                config.bnb_4bit_compute_dtype,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
            )
        made.weight.data = module.weight.data
        if has_bias:
            made.bias.data = module.bias.data
        model.set_submodule(name, made.requires_grad_(False))
    if not linear:
        warnings.warn(
            f"{type(model).__name__} has no linear layer to quantise, so it is loaded unchanged.",
            stacklevel=2,
        )
    return model


def _stays(name: str, whole: Collection[str]) -> bool:
    return name.rpartition(".")[2] in whole or any(
        name == kept or (kept in name and f"{kept}." in name) for kept in whole
    )


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the names of the modules of ``model`` that should not be quantised.

    These are modules with tied weights, and the last module, which mostly is the head.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_keys_to_not_convert

        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        assert get_keys_to_not_convert(model) == ["1"]
        ```
    """
    tied = {name for group in find_tied_parameters(model) for name in group}
    base = getattr(model, "base_model_prefix", None)
    if not tied and base is not None and not hasattr(model, base):
        return []
    last = [name for name, _ in model.named_children()][-1:]
    return sorted({name.replace(".weight", "").replace(".bias", "") for name in (*tied, *last)})


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether ``model`` has layers that bitsandbytes has quantised to 4 bits.

    Examples:
        ```python
        import torch
        from lockstep.utils import has_4bit_bnb_layers

        assert not has_4bit_bnb_layers(torch.nn.Linear(64, 64))
        ```
    """
    return any(
        type(module).__name__ == "Linear4bit" and type(module).__module__.startswith("bitsandbytes")
        for module in model.modules()
    )


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of the first parameter of a module. ``parameter`` is the module, as in Accelerate.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_parameter_device

        assert get_parameter_device(torch.nn.Linear(4, 1)) == torch.device("cpu")
        ```
    """
    return next(parameter.parameters()).device


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype | None,
    offload_folder: str | os.PathLike[str],
    offload_index: dict[str, object],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Write an 8-bit weight and its scales to an offload folder, and leave the weight of the model on the meta
    device.

    Args:
        model: The model, which is changed in place.
        param: The weight [out_features, in_features].
        param_name: Its name in the model.
        new_dtype: The dtype that it is cast to before. None: its own.
        offload_folder: The folder, which exists.
        offload_index: Name -> entry; entries of the files are added to it.
        fp16_statistics: The scales [out_features] of a weight that is quantised already. None: it is quantised on the
            accelerator first.

    Raises:
        RuntimeError: ``fp16_statistics`` is None, and there is no accelerator.

    Examples:
        ```python
        import os
        import torch
        from lockstep.utils import quantize_and_offload_8bit

        os.makedirs("of_8_bits", exist_ok=True)
        model = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False))
        weight, scales, index = torch.ones(2, 4, dtype=torch.int8), torch.ones(2), {}
        quantize_and_offload_8bit(model, weight, "0.weight", torch.float16, "of_8_bits", index, scales)
        assert sorted(index) == ["0.SCB", "0.weight"] and model[0].weight.is_meta
        ```
    """
    scales_name = param_name.replace("weight", "SCB")
    if fp16_statistics is None:
        set_module_tensor_to_device(model, param_name, _accelerator(), value=param, dtype=new_dtype)
        quantised = model.get_parameter(param_name)
        quantised.requires_grad = False
        offload_weight(quantised, param_name, offload_folder, index=offload_index)
        if hasattr(quantised, "SCB"):
            offload_weight(quantised.SCB, scales_name, offload_folder, index=offload_index)
    else:
        offload_weight(param, param_name, offload_folder, index=offload_index)
        offload_weight(fp16_statistics, scales_name, offload_folder, index=offload_index)
    set_module_tensor_to_device(model, param_name, "meta", value=torch.empty(param.shape), dtype=new_dtype)
