"""What a loss is over the batch: a mean, a sum, or neither; found by what the last stage computes.

The loss of the whole batch is differentiated with respect to the outputs of the last stage's blocks, and so is the
loss of each micro-batch. In a mean over m micro-batches the whole batch's gradient in the rows of each is 1/m of that
micro-batch's own, in a sum it is the same; in a mean over unpadded tokens it is as much as the micro-batch has of them.

What a batch could not decide is watched until a later batch does (``Undecided``). A tensor without rows that is zero,
or the same in all micro-batches, may be a mean or a sum over them; so may a part of the loss that has no gradient (an
inactive hinge). Where such a one comes to differ, it must be looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lockstep.torch_internals import autograd as torch_autograd

TOLERANCE, TOLERANCE_ROUNDED = 1e-3, 0.02
TOLERANCE_OF_NUMBERS = 1e-4
# Of rows the second is for GPUs, which may compute in TF32.
TOLERANCE_OF_ROWS, TOLERANCE_OF_ROUNDED_ROWS = (1e-3, 1e-2), 0.1
"""After all blocks: products of larger matrices are rounded in another order. The proof finds what is mixed less."""
MOST_NODES = 2000

T = TypeVar("T")


def found(whole: Tensor, parts: Sequence[Tensor], gradients: Sequence[Tensor], own: Sequence[Tensor]) -> str:
    """``mean``, ``sum`` or ``whole`` (neither).

    Args:
        whole: The loss of the batch, 0-d.
        parts: Those of the micro-batches, 0-d.
        gradients: Of ``whole``, for each micro-batch as one vector [n].
        own: The same of each micro-batch's loss.
    """
    count = len(parts)
    rounded = whole.dtype in (torch.float16, torch.bfloat16)
    tolerance = TOLERANCE_ROUNDED if rounded else TOLERANCE
    losses = torch.stack([part.detach().double() for part in parts])
    # The value alone does not decide: a sum of zeros is a mean as well. So the gradients must be proportional, too.
    for word, share in (("mean", 1 / count), ("sum", 1.0)):
        expected = losses.sum() * share
        if not _close(whole.detach().double(), expected, tolerance * losses.abs().sum() * share):
            continue
        if all(_proportional(g, mine, share, tolerance) for g, mine in zip(gradients, own, strict=True)):
            return word
    return "whole"


def kind_of(whole: Tensor, parts: Sequence[Tensor]) -> str:
    """What a tensor without rows, of any shape, is over the batch: ``mean`` or ``sum`` of those of the micro-batches.

    "": neither. What is the same for all of them is a mean, too.
    """
    # In float64, so that adding up the parts does not round more than the loss itself did.
    values = torch.stack([part.detach().double() for part in parts])
    rounded = whole.dtype in (torch.float16, torch.bfloat16)
    limit = (TOLERANCE_ROUNDED if rounded else TOLERANCE_OF_NUMBERS) * values.abs().sum(0).norm()
    for word, expected, size in (
        ("mean", values.mean(0), limit / len(parts)),
        ("sum", values.sum(0), limit),
    ):
        if bool((whole.detach().double() - expected).norm() <= size):
            return word
    return ""


def same_rows(whole: Tensor, parts: Sequence[Tensor], dim: int, is_autocast: bool) -> bool:
    """Whether the rows of micro-batches, along ``dim``, are those of the batch, of any shape.

    ``is_autocast``: what made them was rounded.
    """
    rows = torch.cat([part.detach() for part in parts], dim)
    if rows.shape != whole.shape:
        return False
    if not whole.is_floating_point():
        return True
    rounded = is_autocast or whole.dtype in (torch.float16, torch.bfloat16)
    a, b = rows.double().nan_to_num(), whole.detach().double().nan_to_num()
    tolerance = TOLERANCE_OF_ROUNDED_ROWS if rounded else TOLERANCE_OF_ROWS[whole.is_cuda]
    return bool((a - b).norm() <= tolerance * b.norm())


def _close(a: Tensor, b: Tensor, limit: Tensor) -> bool:
    return bool((a - b).abs() <= limit)


def _proportional(whole: Tensor, own: Tensor, share: float, tolerance: float) -> bool:
    a, b = whole.double(), own.double() * share
    return bool((a - b).norm() <= tolerance * b.norm()) or bool(a.norm() == b.norm() == 0)


def denominators(loss: Tensor, ends: Sequence[Tensor]) -> tuple[list[object], list[Tensor]]:
    """Numbers that the gradient of a loss, 0-d, depends on, apart from the outputs of blocks (``ends``): how many
    elements a mean has, by what a sum is divided, how many targets count. Where they are the same in all micro-batches,
    a mean of the first batch is one of this batch.

    Returns plain ones and those that are tensors. A function of the user's own is "unknown".
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


def equal(each: Sequence[tuple[list[object], list[Tensor]]]) -> bool:
    """Whether all micro-batches have the same denominators. Waits for the device where these are tensors."""
    plain, tensors = each[0]
    if any(other[0] != plain or len(other[1]) != len(tensors) for other in each[1:]) or "unknown" in plain:
        return False
    if not tensors:
        return True
    # One transfer from the device for all of them; a NaN equals a NaN, as in a mean over no element.
    values = torch.stack([torch.stack([t.double().reshape(()) for t in mine]) for _, mine in each])
    return bool(((values == values[0]) | (values != values)).all())


TensorPath = tuple[str, str]
"""(block, path) of a tensor that the last stage's blocks return, or that the stage receives."""
Edge = tuple[tuple[int, ...], int, str]
"""Of the graph of a loss: the way to a node from the loss, which of its inputs, and the node's name."""


@dataclass
class Undecided:
    """On the rank of the last stage.

    ``places``: whether such a tensor is zero; ``edges``: through which no gradient went, though one came to the node.
    ``is_watched``: whether there is any; the same on all ranks.
    """

    places: dict[TensorPath, bool] = field(default_factory=dict)
    edges: set[Edge] = field(default_factory=set)
    is_watched: bool = False
    _seen: dict[TensorPath, list[Tensor]] = field(default_factory=dict)
    _flags: list[tuple[Edge, Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Another batch comes."""
        self._seen, self._flags = {}, []

    def note(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """What a block returned for a micro-batch, or what was received, by path."""
        for path, value in tensors.items():
            if (name, path) in self.places:
                self._seen.setdefault((name, path), []).append(value.detach().clone())

    def watch(self, loss: Tensor) -> None:
        """The gradient of this loss, 0-d, of a micro-batch."""
        for edge in self.edges:
            way, index, name = edge
            node = _node_at(loss, way)
            # It counts as moved: what was found for the other graph need not hold for this one.
            if node is None or node.name() != name:
                self._flags.append((edge, torch.ones((), dtype=torch.bool, device=loss.device)))
            else:
                node.register_hook(self._looking(edge, index))

    def _looking(self, edge: Edge, index: int) -> Callable[[Sequence[Tensor | None], object], None]:
        def look(inputs: Sequence[Tensor | None], _: object) -> None:
            gradient = inputs[index] if index < len(inputs) else None
            if gradient is not None:
                self._flags.append((edge, gradient.detach().any()))

        return look

    def moved(self) -> tuple[set[TensorPath], set[Edge]]:
        """What this batch may decide. Waits for the device."""
        places = {place for place, values in self._seen.items() if _differ(values, self.places[place])}
        edges = {edge for edge, flag in self._flags if bool(flag)}
        return places, edges


def is_same(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether a tensor without rows, of any shape, has one value in the batch and in all of its micro-batches."""
    return whole.is_floating_point() and all(
        torch.equal(part.detach().nan_to_num(), whole.detach().nan_to_num()) for part in parts
    )


def edges_without_gradient(loss: Tensor, differentiate: Callable[[], T]) -> tuple[T, set[Edge]]:
    """What ``differentiate()`` gives, and through which edges of the graph of ``loss`` it sent nothing but zeros."""
    found: set[Edge] = set()

    def hook(
        way: tuple[int, ...], name: str
    ) -> Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], None]:
        def look(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
            if any(gradient is not None and bool(gradient.any()) for gradient in outputs):
                # A gradient came to the node and went no further: an inactive hinge, or a factor of zero.
                found.update(
                    (way, index, name)
                    for index, gradient in enumerate(inputs)
                    if gradient is not None and not bool(gradient.any())
                )

        return look

    handles = [node.register_hook(hook(way, node.name())) for way, node in _nodes(loss)]
    try:
        return differentiate(), found
    finally:
        for handle in handles:
            handle.remove()


def _nodes(loss: Tensor) -> Iterator[tuple[tuple[int, ...], Node]]:
    """Those of the graph behind ``loss`` that have inputs, each by its first way."""
    seen: set[object] = set()
    waiting: list[tuple[tuple[int, ...], Node | None]] = [((), loss.grad_fn)]
    while waiting and len(seen) < MOST_NODES:
        way, node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.next_functions:
            yield way, node
        waiting += [((*way, index), following) for index, (following, _) in enumerate(node.next_functions)]


def _node_at(loss: Tensor, way: Sequence[int]) -> Node | None:
    node = loss.grad_fn
    for index in way:
        if node is None or index >= len(node.next_functions):
            return None
        node = node.next_functions[index][0]
    return node


def _differ(values: Sequence[Tensor], was_zero: bool) -> bool:
    if was_zero and any(bool(value.any()) for value in values):
        return True
    return any(not torch.equal(value.nan_to_num(), values[0].nan_to_num()) for value in values[1:])
