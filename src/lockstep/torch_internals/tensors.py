"""Tensors: versions, views, memory, sparse parts and the hooks of parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from lockstep.torch_internals.versions import expect, probed

DIGEST_COLUMNS = 256


def version(tensor: Tensor) -> int:
    """Relies on: ``_version`` grows with every write in place, to the tensor or to a view of it; detached ones share
    it. Tensors of inference mode have none: not to be asked for."""
    return int(tensor._version)


def storage_key(tensor: Tensor) -> int:
    """Return the same for tensors with the same memory, and only for them while one is there.

    Relies on: ``_cdata`` of a storage is the address of torch's own record of it.
    """
    return int(tensor.untyped_storage()._cdata)


def storage_uses(tensor: Tensor) -> int | None:
    """Return how many hold the tensor's storage; None if this torch does not tell.

    Relies on: ``_storage_Use_Count`` of that address counts tensors, and the Python object of the storage as one.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage_key(tensor)))


def has_storage(tensor: Tensor) -> bool:
    """Relies on: ``_has_storage`` is False for sparse tensors and the like."""
    return bool(torch._C._has_storage(tensor))


def base_of(tensor: Tensor) -> Tensor:
    """Return what a view is a view of, else itself. Relies on: ``_base`` is None for what is no view."""
    return tensor if tensor._base is None else tensor._base


def is_view(tensor: Tensor) -> bool:
    """Relies on: ``_is_view`` is true where torch refuses to detach in place."""
    return bool(tensor._is_view())


def bits_digest(tensor: Tensor) -> int:
    """Return a number of its bits and their places: equal for equal tensors. Waits for the device."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # As integers: NaN is equal to itself then, and -0.0 is not 0.0.
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.detach().reshape(-1).view(kinds[values.element_size()])
    body = bits[: bits.numel() // DIGEST_COLUMNS * DIGEST_COLUMNS].view(-1, DIGEST_COLUMNS)
    # A changed word changes the sum of its row and that of its column; weighted by places, these tell where.
    sums = (
        body.sum(0, dtype=torch.int64),
        body.sum(1, dtype=torch.int64),
        bits[body.numel() :].to(torch.int64),
    )
    places = (torch.arange(1, 1 + one.numel(), device=one.device) for one in sums)
    return hash(tuple(int((one * place).sum()) for one, place in zip(sums, places, strict=True)))


def negated_lazily(tensor: Tensor) -> Tensor:
    """Return a view with the bit of lazy negation. Relies on: ``_neg_view`` sets what ``is_neg`` reads."""
    return torch._neg_view(tensor)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (indices, values), coalesced or not. Relies on: ``_indices`` and ``_values`` do not coalesce."""
    return tensor._indices(), tensor._values()


def functions_of_subclasses_disabled() -> AbstractContextManager[object]:
    """Hide from a subclass what is done to its tensors inside of the block. Relies on:
    ``DisableTorchFunctionSubclass``."""
    context: AbstractContextManager[object] = torch._C.DisableTorchFunctionSubclass()
    return context


TELLS_NO_VALUE = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"),
            *("is_sparse", "is_cpu", "is_cuda", "is_meta", "is_quantized", "is_nested", "_version"),
        )
    ),
    *(
        getattr(torch.Tensor, name)
        for name in (
            *("size", "dim", "numel", "stride", "is_contiguous", "element_size", "storage_offset"),
            *("is_floating_point", "is_complex", "__len__"),
        )
    ),
}
"""Functions, as ``__torch_function__`` is told of them, that do not read the elements of a tensor.

Relies on: attributes are told of as ``__get__``; ``_version``.
"""

TENSOR, POST_ACCUMULATE = "register_hook", "register_post_accumulate_grad_hook"
"""The kinds of hooks, by the methods that set them."""
_HOOKS = {TENSOR: "_backward_hooks", POST_ACCUMULATE: "_post_accumulate_grad_hooks"}
"""Relies on: these attributes are None or dictionaries with the hooks as values."""


def kinds_of_hooks(parameter: object) -> list[str]:
    """Return the kinds of hooks that this tensor has, other than Lockstep's own."""
    return [kind for kind, name in _HOOKS.items() if getattr(parameter, name) and has_hook(parameter, kind)]


def has_hook(parameter: object, kind: str) -> bool:
    """Return whether the user has set one of this kind."""
    hooks = getattr(parameter, _HOOKS[kind])
    return bool(hooks) and not all(map(_is_ours, hooks.values()))


def kind_of_hook(parameter: object) -> str | None:
    """Return the method that set a hook on this tensor; None: there is none but Lockstep's own."""
    return next(iter(kinds_of_hooks(parameter)), None)


def hooks_of_parameter(parameter: object, kind: str) -> list[Callable[..., torch.Tensor | None]]:
    """Return all hooks of this kind, in the order in which they are called."""
    return list((getattr(parameter, _HOOKS[kind]) or {}).values())


def call_around_others(
    parameter: object, kind: str, first: Callable[..., object], last: object, replaced: tuple[type, ...]
) -> None:
    """Set a hook before all others and, unless it is None, one after them; those of the ``replaced`` types go.

    Relies on: hooks are called in the order in which the dictionary, not ``move_to_end`` of it, has them, each with
    what the one before has returned.
    """
    hooks = getattr(parameter, _HOOKS[kind])
    others = {number: hook for number, hook in hooks.items() if not isinstance(hook, replaced)}
    hooks.clear()
    for hook in (first, last):
        if hook is not None:
            getattr(parameter, kind)(hook)
    # A hook that is set comes last: the order is made by filling the dictionary again.
    ours = list(hooks.items())
    hooks.clear()
    hooks.update([ours[0], *others.items(), *ours[1:]])


def _is_ours(hook: object) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).split(".")[0] == "lockstep"


@probed("Tensor", "keeps versions, views and hooks")
def probe() -> None:
    """Write to a tensor and its views, and look."""
    tensor = torch.zeros(4)
    before, view = version(tensor), tensor[1:]
    view.add_(1)
    expect(version(tensor) == before + 1 == version(tensor.detach()), "the version after a write to a view")
    expect(storage_key(view) == storage_key(tensor) != storage_key(torch.zeros(4)), "the memory of a view")
    expect(base_of(view) is tensor and base_of(tensor) is tensor, "the base of a view")
    expect(negated_lazily(view).is_neg() and not view.is_neg(), "lazy negation")
    leaf = torch.ones(1, requires_grad=True)
    for kind in _HOOKS:
        getattr(leaf, kind)(print)
        expect(hooks_of_parameter(leaf, kind) == [print], "the hooks of a tensor")
