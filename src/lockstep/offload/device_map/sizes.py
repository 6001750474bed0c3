"""How many bytes the parts of a model take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from lockstep.config.values import repr_short
from lockstep.errors import ConfigError

Part = nn.Module | torch.Tensor
NamedPart = tuple[str, Part]


def dtype_of(dtype: torch.dtype | str | None, origin: str = "dtype") -> torch.dtype | None:
    """A dtype from itself or its name, such as ``"float16"`` or ``"torch.float16"``.

    Raises:
        ConfigError: there is no such dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f"{origin}={repr_short(dtype)} is not a dtype. Use one such as 'bfloat16' or torch.float16."
        )
    return found


def is_converted(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype follow the dtype that is asked for: integers and truth values do not."""
    return dtype.is_floating_point or dtype.is_complex


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every module, parameter and buffer by name; ``""`` is the model.

    A tensor with several names counts under the first. ``dtype``: what floating-point tensors become when they are
    loaded, where that is smaller than what they are; ``special_dtypes``: the same for single names, always.
    """
    wanted = dtype_of(dtype)
    special = {
        name: dtype_of(value, f"special_dtypes[{name!r}]") for name, value in (special_dtypes or {}).items()
    }
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in _tensors(model, buffers_only):
        own = tensor.dtype.itemsize
        exact = special.get(name)
        if exact is not None:
            own = exact.itemsize
        elif wanted is not None and is_converted(tensor.dtype):
            own = min(own, wanted.itemsize)
        parts = name.split(".")
        for count in range(len(parts) + 1):
            sizes[".".join(parts[:count])] += tensor.numel() * own
    return sizes


def _tensors(model: nn.Module, buffers_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if not buffers_only:
        yield from model.named_parameters()
    yield from model.named_buffers()


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
) -> int:
    """Bytes of all buffers of the model."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Iterable[NamedPart],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Iterable[str],
) -> tuple[int, list[str]]:
    """The size of the largest layers among ``modules`` and inside of them, and their names.

    A layer is what is never divided: a module without children or of one of the classes, or a single tensor.
    """
    undivided = set(no_split_module_classes)
    largest = 0
    names: list[str] = []
    waiting = list(modules)[::-1]
    while waiting:
        name, part = waiting.pop()
        children = list(part.named_children()) if isinstance(part, nn.Module) else []
        if children and type(part).__name__ not in undivided:
            waiting += [(f"{name}.{key}" if name else key, child) for key, child in reversed(children)]
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, []
        if size == largest:
            names.append(name)
    return largest, names


def class_names(classes: str | Iterable[str] | None) -> list[str]:
    """Names of classes from one name, several, or none."""
    if classes is None:
        return []
    return [classes] if isinstance(classes, str) else list(classes)
