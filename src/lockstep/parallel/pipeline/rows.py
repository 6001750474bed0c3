"""Which arguments of a call are cut into micro-batches, and along which dimension.

Tensors that are as long as the batch are *candidates*. Whether one of them follows the rows is found by what the
computation does: the model is traced, without values, with another number of rows. If a candidate keeps its length
while the others change theirs and the shapes no longer fit, it follows the rows; if shapes only fit where it keeps its
length, it does not. Where both fit, only the user can know.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, combinations, islice, product

import torch
from torch import Tensor, nn

from lockstep.comm.tree import map_leaves, tensor_leaves
from lockstep.config.values import suggestion
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.micro_batch import BatchDims, ModelCall, batch_size

MOST_TRIALS = 64
FEW_ROWS = 2
Trial = Callable[[ModelCall], set[str] | None]
"""The paths of arguments that a forward with this call uses; None: its shapes do not fit."""


def argument_names(model: nn.Module, call: ModelCall) -> dict[str, str]:
    """Path of each tensor -> the name by which people know it: ``ids``, ``batch.mask``, ``target0``."""
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


def given_dims(given: tuple[str, ...], names: Mapping[str, str], call: ModelCall) -> BatchDims:
    """What ``batch_dims`` says: path -> dimension, None for whole.

    Raises:
        UsageError: it names what is no argument, or a dimension that the argument has not.
    """
    tensors = tensor_leaves(call.tree)
    found: dict[str, int | None] = {}
    for entry in given:
        name, _, dim = entry.rpartition("=")
        paths = [path for path, full in names.items() if full == name or full.startswith(f"{name}.")]
        for path in paths:
            found[path] = None if dim == "none" else int(dim)
            if dim != "none" and int(dim) >= tensors[path].ndim:
                raise UsageError(
                    f"batch_dims has {entry}, but '{names[path]}' has shape {tuple(tensors[path].shape)}. Name a "
                    "dimension of this tensor, or write none."
                )
    return found


def check_known(given: tuple[str, ...], names: Mapping[str, str], known: set[str]) -> None:
    """Raise UsageError if ``batch_dims`` names what neither this call nor the model's forward has."""
    for entry in given:
        name = entry.rpartition("=")[0]
        root = name.partition(".")[0]
        if root not in known and not any(
            full == name or full.startswith(f"{name}.") for full in names.values()
        ):
            raise UsageError(
                f"batch_dims names '{name}', which is not an argument of the "
                f"model.{suggestion(name, sorted(known))} Its arguments are "
                f"{', '.join(sorted(known)) or 'none'}."
            )


def known_arguments(model: nn.Module, names: Mapping[str, str]) -> set[str]:
    """Names of the arguments of the forward, and of this call."""
    return {p.name for p in _parameters(model)} | {name.partition(".")[0] for name in names.values()}


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Of its forward; none where Python cannot tell them."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def find(
    call: ModelCall,
    batch: int,
    given: BatchDims,
    names: Mapping[str, str],
    rows: int,
    trial: Trial,
    title: str,
) -> dict[str, int | None]:
    """The dimension of each tensor that is cut; ``given``: what was said; ``rows``: of a micro-batch.

    Raises:
        UsageError: it is not to be known of one of them.
    """
    tensors = tensor_leaves(call.tree)
    open_ = [
        path for path, leaf in tensors.items() if path not in given and leaf.ndim and leaf.shape[0] == batch
    ]
    base: dict[str, int | None] = {path: given.get(path) for path in tensors}
    anchored = any(dim is not None for dim in given.values())
    everything = {**base, **dict.fromkeys(open_, 0)}
    # One candidate alone must be the batch: something is cut.
    if not open_ or (not anchored and len(open_) == 1):
        return everything
    more = _more_rows(batch, tensors)

    def attempt(whole: set[str], counts: tuple[int, ...]) -> set[str] | None:
        dims = base | {path: None if path in whole else 0 for path in open_}
        used: set[str] | None = None
        # A batch without any rows is none.
        if not anchored and len(whole) == len(open_):
            # Something must be cut.
            return None
        for count in counts:
            used = trial(with_rows(call, dims, batch, count))
            if used is None:
                break
        return used

    # The first tensor is mostly the batch: only if nothing else fits may it be whole.
    frees = [open_] if anchored else [open_[1:], open_]
    # With another number of rows first, and if no choice fits, with that of a micro-batch alone.
    for counts, free in product(((more, rows), (rows,)), frees):
        tried = _tried(free, functools.partial(attempt, counts=counts))
        if tried is None:
            continue
        whole, unknown = tried
        if unknown:
            raise _ambiguous(unknown, names, tensors, batch, title)
        return everything | dict.fromkeys(whole, None)
    # It runs in no way without values: tracing it says why.
    return everything


def batch_of(call: ModelCall, given: BatchDims, trial: Trial) -> int:
    """How many samples a call has: as many as its first tensor has rows, unless the model does not run with more of
    these, but does with more rows of others.

    Raises:
        UsageError: no tensor has rows.
    """
    first = batch_size(call, given)
    tensors = {path: leaf for path, leaf in tensor_leaves(call.tree).items() if leaf.ndim}
    lengths = dict.fromkeys(leaf.shape[0] for path, leaf in tensors.items() if path not in given)
    if any(dim is not None for dim in given.values()) or len(lengths) < 2:
        return first
    for batch in lengths:
        rows = [path for path, leaf in tensors.items() if path not in given and leaf.shape[0] == batch]
        more = _more_rows(batch, tensors)
        for whole in islice(_subsets(rows), MOST_TRIALS):
            dims = {path: 0 for path in rows if path not in whole}
            counts = (more, FEW_ROWS)
            if dims and all(trial(with_rows(call, dims, batch, n)) is not None for n in counts):
                return batch
    return first


def _more_rows(batch: int, tensors: Mapping[str, Tensor]) -> int:
    """Not fewer than the batch, for a tensor that is as long may be looked up row by row; and like no other length."""
    sizes = {size for tensor in tensors.values() for size in tensor.shape}
    # No multiple of a small number, so that no view fits by chance.
    return next(
        n for n in range(batch + 1, batch + 1000) if n not in sizes and all(n % p for p in (2, 3, 5, 7))
    )


def _tried(
    free: list[str], attempt: Callable[[set[str]], set[str] | None]
) -> tuple[set[str], list[str]] | None:
    """Those of ``free`` that are whole, and those that might be either; None: nothing fits."""
    whole: set[str] | None = None
    used: set[str] = set()
    for chosen in islice(_subsets(free), MOST_TRIALS):
        result = attempt(chosen)
        if result is not None:
            whole, used = chosen, result
            break
    if whole is None:
        return None
    # What the forward does not use fits either way, and may be cut or not.
    relevant = [path for path in free if path in used]
    groups = [set(group) for size in (1, 2) for group in combinations(relevant, size)]
    if len(relevant) > 2:
        groups.append(set(relevant))
    # If the other choice fits as well, shapes do not say which is right.
    for group in groups:
        if attempt(whole ^ group) is not None:
            return whole, sorted(group)
    return whole, []


def _subsets(items: list[str]) -> Iterator[set[str]]:
    return (
        set(one) for one in chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))
    )


def with_rows(call: ModelCall, dims: BatchDims, batch: int, rows: int) -> ModelCall:
    """The call with ``rows`` rows: those that there are, again and again."""

    def chosen(path: str, leaf: object) -> object:
        dim = dims.get(path)
        if not isinstance(leaf, Tensor) or dim is None:
            return leaf
        places = torch.arange(rows, device=leaf.device) % batch
        return leaf.detach().index_select(dim, places).requires_grad_(leaf.requires_grad)

    return ModelCall(*map_leaves(chosen, call.tree))


def _ambiguous(
    paths: list[str], names: Mapping[str, str], tensors: Mapping[str, Tensor], batch: int, title: str
) -> UsageError:
    first = names[paths[0]]
    both = " and ".join(f"'{names[path]}' {tuple(tensors[path].shape)}" for path in paths)
    return UsageError(
        f"{title} was called with {both}, as long as the batch of {batch}, and its forward runs with and without "
        f"cutting these into micro-batches. So it is not clear which is right. Write batch_dims={first}=0 in "
        f"parallel='pp=...' if the rows of {first} belong to the samples of the batch, or "
        f"batch_dims={first}=none if every micro-batch needs all of it."
    )


def described(dims: BatchDims, names: Mapping[str, str]) -> str:
    """``ids, mask (dim 0); whole: pos``."""
    cut = [
        f"{names[path]}" + ("" if dim == 0 else f" (dim {dim})")
        for path, dim in dims.items()
        if dim is not None
    ]
    whole = [names[path] for path, dim in dims.items() if dim is None]
    return ", ".join(cut) + (f"; given whole to each: {', '.join(whole)}" if whole else "")
