"""Names that scripts import from ``accelerate.utils.other``."""

from __future__ import annotations

import codecs
import logging
import platform
import socket
import warnings
from collections.abc import Mapping, MutableMapping
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import ConfigError
from lockstep.torch_internals import compile as torch_compile
from lockstep.torch_internals import modules as torch_modules
from lockstep.utils import (
    clear_environment,
    extract_model_from_parallel,
    is_compiled_module,
    patch_environment,
    save,
    wait_for_everyone,
)
from lockstep.utils.constants import FSDP_PYTORCH_VERSION

logger = logging.getLogger(__name__)

__all__ = [
    "FSDP_PYTORCH_VERSION",
    "TORCH_SAFE_GLOBALS",
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "clear_environment",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "has_repeated_blocks",
    "is_compiled_module",
    "is_port_in_use",
    "is_repeated_blocks",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "patch_environment",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
]

TORCH_SAFE_GLOBALS: list[Any] = [
    *{type(np.dtype(name)) for name in np.sctypeDict if isinstance(name, str)},
    codecs.encode,
    np.dtype,
    np.ndarray,
    np.array(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
]
"""What ``load`` lets torch rebuild beside tensors and plain values: arrays of NumPy, such as states of generators."""


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """``torch.load``, by default with ``weights_only``, which then allows arrays of NumPy too.

    Examples:
        ```python
        import torch
        from lockstep import PartialState
        from lockstep.utils import load, save

        state = PartialState()
        save({"step": 3, "mean": torch.zeros(4)}, "to_load.pt")  # rank 0 writes
        state.wait_for_everyone()
        assert load("to_load.pt")["step"] == 3
        ```
    """
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


# -- compiling block by block ----------------------------------------------------------------------------


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether it is a ``ModuleList`` of several modules of one class."""
    return (
        isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether it has such a list, at any depth."""
    return any(is_repeated_blocks(part) for part in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """A copy of a model, sharing its parameters, in which each repeated block is compiled by itself.

    The blocks are alike, so that the compiler works once where it would else work on the whole. A model without such
    blocks is compiled as one. ``compile_kwargs`` are those of ``torch.compile``.
    """
    compiled = _with_compiled_blocks(module, compile_kwargs)
    if not is_compiled_module(compiled):
        torch_compile.mark_compiled(compiled, module)
    return compiled


def _with_compiled_blocks(module: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    if is_repeated_blocks(module):
        blocks: Any = [torch.compile(block, **options) for block in module.children()]
        return nn.ModuleList(blocks)
    if not has_repeated_blocks(module):
        whole: Any = torch.compile(module, **options)
        return whole
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(module.__dict__)
    children = torch_modules.children_of(module)
    torch_modules.set_children_of(
        copied, {name: child and _with_compiled_blocks(child, options) for name, child in children.items()}
    )
    return copied


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """``compile_regions`` in place, for a model whose blocks are sharded."""
    if not has_repeated_blocks(module):
        module.compile(**compile_kwargs)
        return module
    for part in module.modules():
        if is_repeated_blocks(part):
            for block in part.children():
                block.compile(**compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """``compile_regions_fsdp2`` without a result."""
    compile_regions_fsdp2(module, **compile_kwargs)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether one of its blocks is compiled by itself."""
    return any(is_compiled_module(part) for part in module.modules() if part is not module)


# -- models ----------------------------------------------------------------------------------------------


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules, those inside of others first; with ``return_fqns`` pairs of (name, module)."""
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)
        found.append((name, module))

    visit("", model)
    return found if return_fqns else [module for _, module in found]


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter is a ``DTensor``."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Over how many ranks transformers has split the model when it loaded it; None: it has not."""
    size = getattr(model, "tp_size", None)
    return size if isinstance(size, int) else None


def clean_state_dict_for_safetensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict with one of the names of each tensor that has several, and contiguous, for safetensors."""
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in state_dict.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
            names.setdefault(place, []).append(name)
    others = {name for group in names.values() for name in group[1:]}
    if others:
        warnings.warn(f"{sorted(others)} are stored under other names of the same tensors.", stacklevel=2)
    return {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
        if name not in others
    }


# -- anything --------------------------------------------------------------------------------------------


def convert_bytes(size: float) -> str:
    """A number of bytes for people: ``"1.5 KB"``, in powers of 1024."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def get_pretty_name(obj: Any) -> str:
    """The name of a class or function, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: Mapping[str, Any], destination: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """``destination`` with all of ``source``, section by section, in place."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """The attribute at the end of a path such as ``"a.b.c"``."""
    return reduce(getattr, attr.split("."), obj)


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether something on this machine listens on a port; None: on 29500, torch's own."""
    number = 29500 if port is None else int(port)
    if not 0 <= number < 65536:
        raise ConfigError(f"port is {port}, but must be from 0 to 65535. Pass such a number.")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("127.0.0.1", number)) == 0


def get_free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        number: int = probe.getsockname()[1]
        return number


def check_os_kernel() -> None:
    """Warn of a Linux kernel older than 5.5, with which processes can hang."""
    if platform.system() != "Linux":
        return
    release = platform.release()
    numbers = [int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit()]
    if numbers < [5, 5]:
        logger.warning(
            f"This Linux kernel is {release}; processes can hang with those before 5.5.0. Update it."
        )
