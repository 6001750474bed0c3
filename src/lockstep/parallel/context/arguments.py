"""Which dimension of a block's arguments runs along the sequence: by name and shape, in one place.

S is the length of the whole sequence, b the batch size, both from the hidden states, [b, S, width].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.comm.tree import leaves
from lockstep.errors import UsageError

MASKS = ("mask", "bias")
"""Parts of names of arguments that say which keys a query sees: they stay whole."""

CACHES = ("past_key_values", "past_key_value", "layer_past", "kv_cache")


def hidden_states(block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor among the arguments.

    Raises:
        UsageError: it is not [batch, sequence, width].
    """
    for leaf in (leaves(args) | leaves(kwargs)).values():
        if isinstance(leaf, Tensor):
            if leaf.is_nested or leaf.ndim != 3 or not leaf.is_floating_point():
                shape = "a nested tensor" if leaf.is_nested else f"{leaf.dtype} {list(leaf.shape)}"
                raise UsageError(
                    f"The first tensor that block '{block}' gets is {shape}, but context parallelism splits hidden "
                    "states [batch, sequence, width]. Name the modules that take these with blocks=..."
                )
            return leaf
    raise UsageError(
        f"Block '{block}' gets no tensor, but context parallelism splits its hidden states [batch, sequence, width]. "
        "Name other modules with blocks=..."
    )


def sequence_dim(block: str, name: str, tensor: Tensor, batch: int, length: int) -> int | None:
    """The dimension of an argument beside the hidden states that is split; None: it stays whole.

    - Named like a mask or bias, or [S, S], or 4-D and [..., S, S]: whole.
    - [1 or b, S, ...], as position ids and rotary tables: dim 1.
    - [1 or b, 1 or heads, S, d]: dim 2.
    - [S] and [S, d], without a batch: dim 0.

    Raises:
        UsageError: S = b, so that [S] or [S, d] may as well have a row for each sample.
    """
    shape = tuple(tensor.shape)
    if tensor.is_nested or length not in shape or any(part in name.lower() for part in MASKS):
        return None
    if shape == (length, length) and (
        batch != length or tensor.is_floating_point() or tensor.dtype is torch.bool
    ):
        return None
    if len(shape) == 4 and shape[2:] == (length, length):
        return None
    if len(shape) > 1 and shape[1] == length and shape[0] in (1, batch):
        return 1
    if len(shape) == 4 and shape[2] == length and shape[0] in (1, batch):
        return 2
    if len(shape) <= 2 and shape[0] == length:
        if batch == length:
            raise UsageError(
                f"Argument '{name}' of block '{block}' is {list(shape)}, and batch size and sequence length are both "
                f"{length}, so it cannot be told whether it is to be split. Give it a batch dimension, [1, {length}, "
                "...], or change the batch size."
            )
        return 0
    return None


def holds_cache(name: str, value: Any) -> bool:
    """Whether an argument is a store of keys and values of earlier calls."""
    return value is not None and (name in CACHES or hasattr(value, "get_seq_length"))
