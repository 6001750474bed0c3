"""Parameters that other ranks of a pipeline hold: they may be looked at, but have no values here.

Relies on: ``__torch_function__`` of a subclass is asked before anything is read or computed, also for attributes;
tensors on the meta device have shapes and no values; ``torch._C.DisableTorchFunctionSubclass``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.errors import UsageError

_ABOUT = "_lockstep_absent"
# Drawn on one rank alone, they would leave the generators of the ranks apart.
_RANDOM = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "orthogonal_")


class AbsentTensor(torch.Tensor):
    """What follows from absent parameters alone is absent, too. Where values of this rank come in, it is an error.

    Changing an absent tensor in place does nothing: its rank does it.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        name = getattr(function, "__name__", "")
        attribute = getattr(function, "__self__", None)
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            about, device = next(vars(one)[_ABOUT] for one in tensors if isinstance(one, AbsentTensor))
            if attribute is torch.Tensor.device:
                # Such as for noise, of which every rank draws all.
                return device
            # Setting a gradient to None, as ``zero_grad`` does, changes nothing.
            if name in ("backward", "register_hook", "register_post_accumulate_grad_hook") or (
                attribute is torch.Tensor.grad and name == "__get__"
            ):
                raise _refusal(about)
            is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
            changed = next(iter((*args, *(kwargs or {}).values())))
            is_random = name.startswith("rand") or name.endswith(_RANDOM)
            if is_in_place and isinstance(changed, AbsentTensor) and not is_random:
                return changed
            if is_random or not all(one.is_meta for one in tensors):
                raise _refusal(about)
            try:
                found = function(*args, **(kwargs or {}))
            # A value was needed; NotImplementedError is one of the first.
            except (RuntimeError, TypeError) as error:
                raise _refusal(about) from error
            return tree_map_only(torch.Tensor, lambda tensor: _absent(tensor, about, device), found)


class AbsentParameter(AbsentTensor, nn.Parameter):
    """A parameter of another rank."""


def absent_parameter(name: str, model: str, like: nn.Parameter) -> AbsentParameter:
    """Return the parameter ``name`` of a model of class ``model``, with the shape of ``like`` and without its
    values."""
    empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
    made = AbsentParameter(empty, like.requires_grad)
    vars(made).update(vars(like))
    vars(made)[_ABOUT] = f"'{name}' of {model}", like.device
    return made


def _absent(tensor: torch.Tensor, about: str, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, AbsentTensor):
        return tensor
    made = tensor.as_subclass(AbsentTensor)
    vars(made)[_ABOUT] = about, device
    return made


def _refusal(about: str) -> UsageError:
    return UsageError(
        f"The script computed with {about}, which is on another rank of the pipeline: neither its values nor its "
        "gradient are here. Clip gradients with accelerator.clip_grad_norm_(), which takes the norm over all "
        "ranks. Where this rank's own parameters are enough, skip those for which parameter.is_meta is true. "
        "Take copies of the prepared model's parameters after its first forward, which decides where those "
        "outside of blocks belong."
    )
