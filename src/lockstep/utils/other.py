"""Names that scripts import from ``accelerate.utils.other``."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from lockstep.comm.tree import Kwargs
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

__all__ = [
    "clear_environment",
    "compile_regions",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_module_children_bottom_up",
    "has_repeated_blocks",
    "is_compiled_module",
    "is_repeated_blocks",
    "patch_environment",
    "save",
    "wait_for_everyone",
]

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
        from lockstep.utils import compile_regions

        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), num_layers=2)
        compiled = compile_regions(model, backend="eager")
        assert compiled is not model and compiled.layers[0].linear1.weight is model.layers[0].linear1.weight
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
                "copy with compiled blocks. Call compile_regions before."
            )
        copied.forward = MethodType(forward.__func__, copied)
    children = torch_modules.children_of(module)
    torch_modules.set_children_of(
        copied, {name: child and _with_compiled_blocks(child, options) for name, child in children.items()}
    )
    return copied


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
