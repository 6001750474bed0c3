"""Tensors: versions, views, memory, sparse parts and the hooks of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.torch_internals.versions import expect, probed

DIGEST_COLUMNS = 256


def version(tensor: Tensor) -> int:
    """Relies on: ``_version`` grows with every write in place, to the tensor or to a view of it; detached ones share
    it. Tensors of inference mode have none: not to be asked for."""
    return int(tensor._version)


def storage_key(tensor: Tensor) -> int:
    """The same for tensors with the same memory, and only for them while one is there.

    Relies on: ``_cdata`` of a storage is the address of torch's own record of it.
    """
    return int(tensor.untyped_storage()._cdata)


def storage_uses(tensor: Tensor) -> int | None:
    """How many hold the tensor's storage; None if this torch does not tell.

    Relies on: ``_storage_Use_Count`` of that address counts tensors, and the Python object of the storage as one.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage_key(tensor)))


def has_storage(tensor: Tensor) -> bool:
    """Relies on: ``_has_storage`` is False for sparse tensors and the like."""
    return bool(torch._C._has_storage(tensor))


def base_of(tensor: Tensor) -> Tensor:
    """What a view is a view of, else itself. Relies on: ``_base`` is None for what is no view."""
    return tensor if tensor._base is None else tensor._base


def is_view(tensor: Tensor) -> bool:
    """Relies on: ``_is_view`` is true where torch refuses to detach in place."""
    return bool(tensor._is_view())


def bits_digest(tensor: Tensor) -> int:
    """A number of its bits and their places: equal for equal tensors. Waits for the device."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.detach().reshape(-1).view(kinds[values.element_size()])
    body = bits[: bits.numel() // DIGEST_COLUMNS * DIGEST_COLUMNS].view(-1, DIGEST_COLUMNS)
    sums = (
        body.sum(0, dtype=torch.int64),
        body.sum(1, dtype=torch.int64),
        bits[body.numel() :].to(torch.int64),
    )
    places = (torch.arange(1, 1 + one.numel(), device=one.device) for one in sums)
    return hash(tuple(int((one * place).sum()) for one, place in zip(sums, places, strict=True)))


def negated_lazily(tensor: Tensor) -> Tensor:
    """A view with the bit of lazy negation. Relies on: ``_neg_view`` sets what ``is_neg`` reads."""
    return torch._neg_view(tensor)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(indices, values), coalesced or not. Relies on: ``_indices`` and ``_values`` do not coalesce."""
    return tensor._indices(), tensor._values()


def gradient_hooks_of(tensor: Tensor) -> list[Callable[..., Any]]:
    """Of ``register_hook``, in order. Relies on: ``_backward_hooks`` is a dictionary of them, or None."""
    return list((getattr(tensor, "_backward_hooks", None) or {}).values())


def post_accumulate_hooks_of(tensor: Tensor) -> list[Callable[..., object]]:
    """Of ``register_post_accumulate_grad_hook``. Relies on: ``_post_accumulate_grad_hooks``, the same."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


@probed("Tensor", "keeps versions, views and hooks")
def probe() -> None:
    """Write to a tensor and its views, and look."""
    tensor = torch.zeros(4)
    before = version(tensor)
    view = tensor[1:]
    view.add_(1)
    expect(version(tensor) == before + 1 == version(tensor.detach()), "the version after a write to a view")
    expect(storage_key(view) == storage_key(tensor) != storage_key(torch.zeros(4)), "the memory of a view")
    expect(base_of(view) is tensor and base_of(tensor) is tensor, "the base of a view")
    expect(is_view(view) and not is_view(tensor), "what is a view")
    expect(negated_lazily(view).is_neg() and not view.is_neg(), "lazy negation")
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (3,), is_coalesced=False, check_invariants=True
    )
    indices, values = sparse_parts(sparse)
    expect((indices.tolist(), values.tolist()) == ([[1, 1]], [1.0, 2.0]), "the parts of a sparse tensor")
    expect(has_storage(tensor) and not has_storage(sparse), "what has memory of its own")
    used = storage_uses(tensor)
    if used is not None:
        more = tensor[:2]
        expect(storage_uses(tensor) == used + 1 and more.numel() == 2, "how many hold one memory")
    _probe_hooks()


def _probe_hooks() -> None:
    leaf = torch.ones(1, requires_grad=True)
    expect(gradient_hooks_of(leaf) == [] == post_accumulate_hooks_of(leaf), "a tensor without hooks")

    def hook(_: Tensor) -> None:
        """Changes nothing."""

    leaf.register_hook(hook)
    leaf.register_post_accumulate_grad_hook(hook)
    expect(gradient_hooks_of(leaf) == [hook] == post_accumulate_hooks_of(leaf), "the hooks of a tensor")
