"""Regional compilation: which modules of a model ``torch.compile`` compiles, the whole or each block by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch import nn

from lockstep.config.enums import Compile
from lockstep.config.parallel import Parallel
from lockstep.errors import UsageError
from lockstep.model.blocks import find_blocks
from lockstep.model.changes import Subclassed, subclass

WHOLE = ("",)
"""The name of a model within itself."""


def find_regions(
    model: nn.Module, parallel: Parallel, by_blocks: bool, blocks: Collection[str]
) -> tuple[str, ...]:
    """Return the names of the modules to compile; ``("",)`` is the whole model.

    ``by_blocks``: each block, if the model has some. ``blocks``: the names of those that are to be sharded or split one
    by one; with them, only blocks can be compiled.

    Raises:
        UsageError: ``compile=blocks`` of a model without blocks.
    """
    found = tuple(find_blocks(model, parallel.blocks)) if by_blocks and not blocks else tuple(blocks)
    if not found and parallel.compile is Compile.BLOCKS:
        raise UsageError(
            f"compile=blocks works on blocks, but {type(model).__name__} was given without any. Name them with "
            "blocks=..., as a class or as a pattern such as 'layers.*', or compile the whole model with "
            "dynamo_backend='inductor'."
        )
    return found or WHOLE


class VisibleForward(Subclassed):
    """Mixed into layers of torch itself, such as ``nn.TransformerEncoderLayer``: ``Module.compile`` leaves out calls
    whose code is in torch's own files, and says nothing."""

    def forward(self, *args: object, **kwargs: object) -> object:
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def compile_regions(modules: Iterable[nn.Module], arguments: Mapping[str, object]) -> None:
    """Compile these modules at their first call, with arguments of ``torch.compile``. They stay the same objects."""
    classes: dict[type, type] = {}
    for module in modules:
        cls = type(module)
        if _is_of_torch(cls.forward) and "forward" not in vars(module):
            module.__class__ = classes.setdefault(cls, subclass(cls, VisibleForward))
        module.compile(**arguments)


def _is_of_torch(function: Callable[..., object]) -> bool:
    return function.__module__.partition(".")[0] == "torch"
