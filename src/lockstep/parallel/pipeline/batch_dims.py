"""Which dimension of each argument is the batch: dim 0, unless ``batch_dims`` says otherwise.

A tensor whose dim 0 is of another size than the batch (positions, a mask of one row) goes whole into each micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import Tensor, nn

from lockstep.comm.tree import tensor_leaves
from lockstep.config.values import suggestion
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.micro_batch import BatchDims, ModelCall


def find_batch(model: nn.Module, call: ModelCall, stated: tuple[str, ...]) -> tuple[int, BatchDims]:
    """Return how many samples a call has, and the dimension of each tensor that is cut; ``stated``: ``batch_dims``.

    Raises:
        UsageError: ``batch_dims`` does not fit the call, or no tensor has a batch dimension.
    """
    tensors = tensor_leaves(call.tree)
    names = argument_names(model, call)
    given = _stated_dims(stated, names, tensors)
    _check_names(model, stated, names)
    size = _batch_size(tensors, given)
    dims = {path: 0 if leaf.ndim and leaf.shape[0] == size else None for path, leaf in tensors.items()}
    return size, dims | given


def argument_names(model: nn.Module, call: ModelCall) -> dict[str, str]:
    """Map the path of each tensor to the name by which people know it: ``ids``, ``batch.mask``, ``target0``."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p.name for p in _parameters(model) if p.kind in plain]
    found: dict[str, str] = {}
    roots = [
        (f"[0][{i}]", positional[i] if i < len(positional) else f"arg{i}") for i in range(len(call.args))
    ]
    roots += [(f"[1][{name!r}]", name) for name in call.kwargs]
    roots += [(f"[2][{i}]", f"target{i}") for i in range(len(call.targets))]
    for path in tensor_leaves(call.tree):
        for start, name in roots:
            if path.startswith(start):
                inner = path[len(start) :].replace("'", "").replace("[", ".").replace("]", "")
                found[path] = name + inner
    return found


def described(dims: BatchDims, names: Mapping[str, str]) -> str:
    """Return ``ids, mask (dim 1); given whole to each: pos``."""
    cut = [names[path] + (f" (dim {dim})" if dim else "") for path, dim in dims.items() if dim is not None]
    whole = [names[path] for path, dim in dims.items() if dim is None]
    return ", ".join(cut) + (f"; given whole to each: {', '.join(whole)}" if whole else "")


def _stated_dims(
    stated: tuple[str, ...], names: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for entry in stated:
        name, _, dim = entry.rpartition("=")
        for path in [path for path, full in names.items() if _is_in(full, name)]:
            found[path] = None if dim == "none" else int(dim)
            if dim != "none" and int(dim) >= tensors[path].ndim:
                raise UsageError(
                    f"batch_dims has {entry}, but '{names[path]}' has shape {tuple(tensors[path].shape)}. Name a "
                    "dimension of this tensor, or write none."
                )
    return found


def _check_names(model: nn.Module, stated: tuple[str, ...], names: Mapping[str, str]) -> None:
    known = {p.name for p in _parameters(model)} | {name.partition(".")[0] for name in names.values()}
    for name in (entry.rpartition("=")[0] for entry in stated):
        if name.partition(".")[0] not in known and not any(_is_in(full, name) for full in names.values()):
            raise UsageError(
                f"batch_dims names '{name}', which is not an argument of the "
                f"model.{suggestion(name, sorted(known))} Its arguments are "
                f"{', '.join(sorted(known)) or 'none'}."
            )


def _batch_size(tensors: Mapping[str, Tensor], given: BatchDims) -> int:
    sizes = {tensors[path].shape[dim] for path, dim in given.items() if dim is not None}
    if len(sizes) > 1:
        raise UsageError(
            f"The dimensions that batch_dims names have different sizes: {', '.join(map(str, sorted(sizes)))}. "
            "For each argument, name the dimension that has as many entries as the batch has samples."
        )
    if sizes:
        return sizes.pop()
    for path, leaf in tensors.items():
        if leaf.ndim and path not in given:
            return leaf.shape[0]
    raise UsageError(
        "The model was called without a tensor that has a batch dimension, so a pipeline cannot cut it into "
        "micro-batches. Pass the batch as tensors."
    )


def _is_in(full: str, name: str) -> bool:
    return full == name or full.startswith(f"{name}.")


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Return those of its forward; none where Python cannot tell them."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []
