"""Names that scripts import from ``accelerate.utils.other``."""

from __future__ import annotations

import codecs
import logging
import platform
import re
import socket
import warnings
from collections.abc import Mapping, MutableMapping
from functools import reduce
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.comm.tree import Kwargs
from lockstep.config.values import MAX_PORT, USUAL_PORT, parse_integer
from lockstep.errors import UsageError
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
    """Read a file that ``save`` or ``torch.save`` wrote.

    It is ``torch.load`` with ``weights_only=True``, which runs no code from the file. It reads tensors of any shape,
    plain values and arrays of NumPy.

    Args:
        f: The path, or an open file.
        map_location: Where tensors go, as for ``torch.load``. None: the devices that they were saved from.
        kwargs: Further arguments of ``torch.load``. ``weights_only=False`` also reads other objects.

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
    """Return whether ``module`` is a ``ModuleList`` of at least two modules of one class.

    Examples:
        ```python
        import torch
        from lockstep.utils import is_repeated_blocks

        assert is_repeated_blocks(torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]))
        assert not is_repeated_blocks(torch.nn.Linear(4, 4))
        ```
    """
    return (
        isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether ``module`` has such a list of repeated blocks, at any depth.

    Examples:
        ```python
        import torch
        from lockstep.utils import has_repeated_blocks

        encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), num_layers=2)
        assert has_repeated_blocks(encoder)
        ```
    """
    return any(is_repeated_blocks(part) for part in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: object) -> nn.Module:
    """Return a copy of a model in which each repeated block is compiled by itself. The copy shares the parameters.

    Repeated blocks are alike, so that the compiler works once for all of them. A model without such blocks is
    compiled as a whole.

    Args:
        module: The model, which stays as it is.
        compile_kwargs: Arguments of ``torch.compile``.

    Raises:
        UsageError: the model's ``forward`` was replaced by a function that calls this model.

    Examples:
        ```python
        import torch
        from lockstep.utils import compile_regions, has_compiled_regions

        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), num_layers=2)
        compiled = compile_regions(model, backend="eager")
        assert has_compiled_regions(compiled) and not has_compiled_regions(model)
        ```
    """
    compiled = _with_compiled_blocks(module, compile_kwargs)
    if not is_compiled_module(compiled):
        torch_compile.mark_compiled(compiled, module)
    return compiled


def _with_compiled_blocks(module: nn.Module, options: Kwargs) -> nn.Module:
    if is_repeated_blocks(module):
        blocks: Any = [torch.compile(block, **options) for block in module.children()]
        return nn.ModuleList(blocks)
    if not has_repeated_blocks(module):
        whole: Any = torch.compile(module, **options)
        return whole
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(module.__dict__)
    forward = vars(module).get("forward")
    if forward is not None:
        if getattr(forward, "__self__", None) is not module:
            raise UsageError(
                f"{type(module).__name__}.forward was replaced by {forward!r:.80}, which calls this model, and not a "
                "copy with compiled blocks. Call compile_regions before, or compile_regions_fsdp2 (in place)."
            )
        copied.forward = MethodType(forward.__func__, copied)
    children = torch_modules.children_of(module)
    torch_modules.set_children_of(
        copied, {name: child and _with_compiled_blocks(child, options) for name, child in children.items()}
    )
    return copied


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: object) -> nn.Module:
    """Compile each repeated block of a sharded model, in place, and return the model.

    Args:
        module: The model. Without repeated blocks it is compiled as a whole.
        compile_kwargs: Arguments of ``torch.nn.Module.compile``.

    Examples:
        ```python
        import torch
        from lockstep.utils import compile_regions_fsdp2

        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), num_layers=2)
        assert compile_regions_fsdp2(model, backend="eager") is model
        ```
    """
    if not has_repeated_blocks(module):
        module.compile(**compile_kwargs)
        return module
    for part in module.modules():
        if is_repeated_blocks(part):
            for block in part.children():
                block.compile(**compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: object) -> None:
    """Compile each repeated block of a model, in place.

    Args:
        module: The model. Without repeated blocks it is compiled as a whole.
        compile_kwargs: Arguments of ``torch.nn.Module.compile``.

    Examples:
        ```python
        import torch
        from lockstep.utils import compile_regions_deepspeed

        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), num_layers=2)
        compile_regions_deepspeed(model, backend="eager")
        ```
    """
    compile_regions_fsdp2(module, **compile_kwargs)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module inside of ``module`` is compiled by itself.

    Examples:
        ```python
        import torch
        from lockstep.utils import has_compiled_regions

        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.compile(torch.nn.Linear(4, 4)))
        assert has_compiled_regions(model)
        ```
    """
    return any(is_compiled_module(part) for part in module.modules() if part is not module)


# -- models ----------------------------------------------------------------------------------------------


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all modules of ``model``, with the modules inside of another one before it.

    Args:
        model: The model, which is the last entry.
        return_fqns: Return pairs (name, module).

    Examples:
        ```python
        import torch
        from lockstep.utils import get_module_children_bottom_up

        model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 1)))
        names = [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)]
        assert names == ["0.0", "0", ""]
        ```
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)
        found.append((name, module))

    visit("", model)
    return found if return_fqns else [module for _, module in found]


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter of ``model`` is a ``DTensor``, as those of sharded models are.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import model_has_dtensor

        accelerator = Accelerator(parallel="zero=3")
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert model_has_dtensor(model) == (accelerator.num_processes > 1)
        ```
    """
    return any(is_dtensor(parameter) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the number of ranks over which transformers split ``model`` when it loaded it. None: it did not.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_model_tp_size

        assert get_model_tp_size(torch.nn.Linear(4, 1)) is None
        ```
    """
    size = getattr(model, "tp_size", None)
    if size is None:  # since transformers 5
        config = getattr(getattr(model, "config", None), "distributed_config", None)
        size = config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)
    return size if isinstance(size, int) else None


def clean_state_dict_for_safetensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict that safetensors can write: contiguous tensors, each under one name only.

    A warning names the other names of tied weights.

    Args:
        state_dict: Name -> tensor of any shape.

    Examples:
        ```python
        import torch
        from lockstep.utils import clean_state_dict_for_safetensors

        weight = torch.ones(2, 3)
        state = clean_state_dict_for_safetensors({"embedding": weight, "head": weight, "other": torch.ones(3, 2).T})
        assert list(state) == ["embedding", "other"] and state["other"].is_contiguous()
        ```
    """
    names: dict[tuple[object, ...], list[str]] = {}
    state_dict = {
        name: value.resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
    }
    for name, tensor in state_dict.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
            names.setdefault(place, []).append(name)
    others = {name for group in names.values() for name in group[1:]}
    if others:
        warnings.warn(
            f"{sorted(others)} share memory with other tensors and are saved once, under the names of those.",
            stacklevel=2,
        )
    return {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
        if name not in others
    }


# -- anything --------------------------------------------------------------------------------------------


def convert_bytes(size: float) -> str:
    """Return a number of bytes as a text such as ``"1.5 KB"``, in powers of 1024. ``size`` is the number.

    Examples:
        ```python
        from lockstep.utils import convert_bytes

        assert convert_bytes(1536) == "1.5 KB"
        ```
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def get_pretty_name(obj: Any) -> str:
    """Return the name of ``obj`` if it is a class or a function, and otherwise the name of its class.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_pretty_name

        assert get_pretty_name(torch.nn.Linear(4, 1)) == "Linear"
        ```
    """
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(
    source: Mapping[str, object], destination: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Copy all values of a mapping into another one, section by section, and return that one.

    Args:
        source: The mapping whose values are copied.
        destination: The mapping that is changed. Its other values stay.

    Examples:
        ```python
        from lockstep.utils import merge_dicts

        merged = merge_dicts({"zero": {"stage": 3}}, {"zero": {"stage": 2, "offload": "cpu"}})
        assert merged == {"zero": {"stage": 3, "offload": "cpu"}}
        ```
    """
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: object, attr: str) -> Any:
    """Return the attribute of ``obj`` at the end of the path ``attr``, such as ``"a.b.c"``.

    Raises:
        AttributeError: an attribute on the path does not exist.

    Examples:
        ```python
        import torch
        from lockstep.utils import recursive_getattr

        model = torch.nn.TransformerEncoderLayer(8, 2)
        assert recursive_getattr(model, "self_attn.out_proj") is model.self_attn.out_proj
        ```
    """
    return reduce(getattr, attr.split("."), obj)


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a program on this machine listens on a TCP port.

    Args:
        port: The number of the port. None: 29500, which torch uses.

    Raises:
        ConfigError: ``port`` is not between 0 and 65535.

    Examples:
        ```python
        import socket
        from lockstep.utils import is_port_in_use

        with socket.create_server(("127.0.0.1", 0)) as server:
            assert is_port_in_use(server.getsockname()[1])
        ```
    """
    number = USUAL_PORT if port is None else parse_integer(port, "port", 0, MAX_PORT)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("127.0.0.1", number)) == 0


def get_free_port() -> int:
    """Return the number of a TCP port on which no program of this machine listens now.

    Examples:
        ```python
        from lockstep.utils import get_free_port

        assert 0 < get_free_port() < 65536
        ```
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        number: int = probe.getsockname()[1]
        return number


def check_os_kernel() -> None:
    """Log a warning if this is a Linux kernel before 5.5, with which processes can hang.

    Examples:
        ```python
        from lockstep.utils import check_os_kernel

        check_os_kernel()  # logs a warning for an old Linux
        ```
    """
    if platform.system() != "Linux":
        return
    from packaging.version import Version  # here, because most runs compare no versions

    release = platform.release()
    found = re.match(r"[0-9]+(\.[0-9]+)*", release)
    if found is not None and Version(found[0]) < Version("5.5"):
        logger.warning(
            f"This Linux kernel is {release}; processes can hang with those before 5.5.0. Update it."
        )
