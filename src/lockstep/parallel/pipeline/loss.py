"""What the loss of a batch is of those of its micro-batches: the mean, unless ``loss=`` says otherwise.

A mean over unpadded tokens is no mean of the micro-batches' means, unless these have equally many tokens. So where
nothing is said, the numbers by which micro-batches divide are compared in each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lockstep.parallel.pipeline.micro_batch import ModelCall
from lockstep.torch_internals import autograd as torch_autograd

MOST_NODES = 2000

Denominators = tuple[list[object], list[Tensor]]
"""Plain ones, and those that are tensors."""


def reduction_of(word: str, call: ModelCall) -> str:
    """Return ``mean``, ``sum`` or ``whole``."""
    if word != "auto":
        return word
    # Models of transformers divide the sum by this number.
    return "mean" if call.kwargs.get("num_items_in_batch") is None else "sum"


def denominators(loss: Tensor, ends: Sequence[Tensor]) -> Denominators:
    """Return the numbers that the gradient of a loss, 0-d, depends on, apart from the outputs of blocks (``ends``).

    How many elements a mean has, by what a sum is divided, how many targets count. A function of the user's own is
    "unknown".
    """
    stop = {tensor.grad_fn for tensor in ends if tensor.grad_fn is not None}
    plain: list[object] = []
    tensors: list[Tensor] = []
    seen: set[object] = set()
    waiting: list[Node | None] = [loss.grad_fn]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen or node in stop:
            continue
        seen.add(node)
        module = torch_autograd.module_of_function(node)
        # What a user's own autograd function divides by cannot be seen in its graph node.
        if module is not None and not module.startswith(("torch.", "lockstep.")):
            plain.append("unknown")
        for value in torch_autograd.saved_by(node):
            _note_denominator(value, plain, tensors)
        waiting += [following for following, _ in node.next_functions]
    return plain, tensors


def _note_denominator(value: object, plain: list[object], tensors: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.ndim == 0 and not value.is_complex():
            tensors.append(torch_autograd.copy_of_saved(value))
        else:
            plain.append(tuple(value.shape))
    elif isinstance(value, (bool, int, float)) or (
        isinstance(value, tuple) and all(isinstance(item, int) for item in value)
    ):
        plain.append(value)


def are_equal(each: Sequence[Denominators]) -> bool:
    """Return whether all micro-batches have the same denominators. Waits for the device where these are tensors."""
    plain, tensors = each[0]
    if any(other[0] != plain or len(other[1]) != len(tensors) for other in each[1:]) or "unknown" in plain:
        return False
    if not tensors:
        return True
    # One transfer from the device for all of them; a NaN equals a NaN, as in a mean over no element.
    values = torch.stack([torch.stack([t.double().reshape(()) for t in mine]) for _, mine in each])
    return bool(((values == values[0]) | (values != values)).all())
