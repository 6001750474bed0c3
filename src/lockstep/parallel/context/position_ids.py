"""What models of ``transformers`` need to be told when they are called on chunks of the sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError


def arguments_on_chunks(
    split: dict[int, Tensor], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """``kwargs`` with an attention mask of ones where there is none. ``split``: whole tensors by id of their chunk.

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
            f"{name} was called on chunks of the sequence without position_ids, or with some that are not in buffers. "
            "Add torch.arange(length)[None] to the buffers, and pass it as position_ids."
        )
    if whole.ndim != 2 or bool((whole.diff(dim=1) != 1).any()):
        raise UsageError(
            f"The position_ids for {name} do not rise by one, as where several sequences are packed into a row. Call "
            "it outside of split_sequence, with cp_method=ulysses."
        )
    if mask is None:
        first = next(
            v for v in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if v is not None
        )
        mask = torch.ones(first.shape[:2], dtype=torch.int64, device=first.device)
        return {**kwargs, "attention_mask": mask}
    masked = split.get(id(mask))
    if masked is None or masked.ndim != 2 or not bool(masked.all()):
        raise UsageError(
            f"The attention_mask for {name} hides positions, or is not in buffers, but no rank sees it whole. Leave it "
            "out and pad on the right, with labels of -100, or call the model outside of split_sequence."
        )
    return kwargs
