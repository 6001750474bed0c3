"""Arguments on chunks of the sequence: which dimension runs along it, by name and shape, and what models must be told.

S is the length of the whole sequence, b the batch size, both from the hidden states, [b, S, width].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from lockstep.comm.tree import Args, Kwargs, tensor_leaves
from lockstep.errors import UsageError
from lockstep.torch_internals import tensors as torch_tensors

MASKS = ("mask", "bias")
"""Parts of names of arguments that say which keys a query sees: they stay whole."""

CACHES = ("past_key_values", "past_key_value", "layer_past", "kv_cache")


def hidden_states(block: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    """Return the first tensor among the arguments.

    Raises:
        UsageError: it is not [batch, sequence, width].
    """
    found = next(iter(tensor_leaves((args, kwargs)).values()), None)
    if found is None:
        raise UsageError(
            f"Block '{block}' gets no tensor, but context parallelism splits its hidden states [batch, sequence, "
            "width]. Name other modules with blocks=..."
        )
    if found.is_nested or found.ndim != 3 or not found.is_floating_point():
        shape = "a nested tensor" if found.is_nested else f"{found.dtype} {list(found.shape)}"
        raise UsageError(
            f"The first tensor that block '{block}' gets is {shape}, but context parallelism splits hidden states "
            "[batch, sequence, width]. Name the modules that take these with blocks=..."
        )
    return found


def sequence_dim(block: str, name: str, tensor: Tensor, batch: int, length: int) -> int | None:
    """Return the dimension of an argument beside the hidden states that is split; None: it stays whole.

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
    # [S, S] of integers may as well be position ids of S samples.
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
                f"Argument '{name}' of block '{block}' is {list(shape)}, and batch size and sequence length are "
                f"both {length}, so it is not clear which of them to split. Give it a batch dimension, [1, "
                f"{length}, ...], or change the batch size."
            )
        return 0
    return None


def holds_cache(name: str, value: object) -> bool:
    """Return whether an argument is a store of keys and values of earlier calls."""
    return value is not None and (name in CACHES or hasattr(value, "get_seq_length"))


def arguments_on_chunks(
    split: dict[int, Tensor], model: object, args: Args, kwargs: Kwargs, ones: Callable[[Tensor], Tensor]
) -> dict[str, object]:
    """Return ``kwargs`` with an attention mask of ones where there is none. ``split``: whole tensors by id of their
    chunk.

    ``ones``: such a mask [batch, length] for input ids or embeddings, known as a chunk.

    Without a mask these models take a jump in the position ids for the start of another sequence packed into the
    same row. A chunk of head and tail has one.

    Raises:
        UsageError: no position ids of the whole sequence, sequences packed into rows, or padding.
    """
    name = type(model).__name__
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    whole = split.get(id(positions))
    if whole is None:
        raise UsageError(
            f"{name} was called on chunks of the sequence without position_ids, or with position_ids that are "
            "not in buffers. Add torch.arange(length)[None] to the buffers, and pass it as position_ids."
        )
    if whole.ndim != 2 or bool((whole.diff(dim=1) != 1).any()):
        raise UsageError(
            f"The position_ids for {name} do not rise by one from position to position, as if several sequences "
            "were packed into a row. Call the model outside split_sequence, with cp_method=ulysses."
        )
    if mask is None:
        first = next(
            v for v in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if v is not None
        )
        return {**kwargs, "attention_mask": ones(first)}
    masked = split.get(id(mask))
    if masked is None or masked.ndim != 2 or not bool(masked.all()):
        raise UsageError(
            f"The attention_mask for {name} masks positions, or is not in buffers, but no rank has the whole "
            "mask. Leave the mask out and pad on the right with labels of -100, or call the model outside "
            "split_sequence."
        )
    return kwargs


class Visible(Enum):
    """The keys that a query sees."""

    ALL = "all"
    UP_TO_QUERY = "those up to its own position"
    OTHER = "others"


class Masks:
    """What masks [..., S, S] or [..., 1, S] say. Each is looked at once, since blocks get the same one."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Visible]] = {}

    def visible(self, mask: Tensor) -> Visible:
        """Return what a mask [..., S, S] or [..., 1, S] shows. Waits for the device where it is a new one."""
        known = self._seen.get(id(mask))
        if known is not None and known[0]() is mask and known[1] == torch_tensors.version(mask):
            return known[2]
        found = _visible(mask.detach())
        # Masks that are gone are forgotten, because their ids are given to others.
        self._seen = {key: entry for key, entry in self._seen.items() if entry[0]() is not None}
        self._seen[id(mask)] = (weakref.ref(mask), torch_tensors.version(mask), found)
        return found

    def __deepcopy__(self, memo: object) -> Masks:
        return Masks()


def _visible(mask: Tensor) -> Visible:
    """Read a mask [..., S, S] or [..., 1, S]: True or 0 shows a key, False or the least number hides it."""
    if mask.dtype is torch.bool:
        shown, hidden = mask, ~mask
    elif mask.is_floating_point() and not mask.requires_grad:
        shown, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min
    else:
        return Visible.OTHER
    if bool(shown.all()):
        return Visible.ALL
    # [query, key]: a causal mask shows key <= query.
    before = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.shape[-1] == mask.shape[-2] and bool(torch.where(before, shown, hidden).all()):
        return Visible.UP_TO_QUERY
    return Visible.OTHER
