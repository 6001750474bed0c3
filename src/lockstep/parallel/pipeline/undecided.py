"""What a batch could not decide, watched until a later batch does.

A tensor without rows that is zero, or the same in all micro-batches, may be a mean or a sum over them; so may a part
of the loss that has no gradient (an inactive hinge). Where such a one comes to differ, it must be looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Place = tuple[str, str]
"""(block, path) of a tensor that the last stage's blocks return, or that the stage receives."""
Edge = tuple[tuple[int, ...], int, str]
"""Of the graph of a loss: the way to a node from the loss, which of its inputs, and the node's name."""
MOST_NODES = 2000


@dataclass
class Undecided:
    """On the rank of the last stage.

    ``places``: whether such a tensor is zero; ``edges``: through which no gradient went, though one came to the node.
    ``is_watched``: whether there is any; the same on all ranks.
    """

    places: dict[Place, bool] = field(default_factory=dict)
    edges: set[Edge] = field(default_factory=set)
    is_watched: bool = False
    _seen: dict[Place, list[Tensor]] = field(default_factory=dict)
    _flags: list[tuple[Edge, Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Another batch comes."""
        self._seen, self._flags = {}, []

    def note(self, name: str, tensors: Iterable[tuple[str, object]]) -> None:
        """What a block returned for a micro-batch, or what was received."""
        for path, value in tensors:
            if (name, path) in self.places and isinstance(value, Tensor):
                self._seen.setdefault((name, path), []).append(value.detach().clone())

    def watch(self, loss: Tensor) -> None:
        """The gradient of this loss of a micro-batch."""
        for edge in self.edges:
            way, index, name = edge
            node = _node_at(loss, way)
            if node is None or node.name() != name:  # the graph is another one
                self._flags.append((edge, torch.ones((), dtype=torch.bool, device=loss.device)))
            else:
                node.register_hook(self._looking(edge, index))

    def _looking(self, edge: Edge, index: int) -> Callable[[Any, object], None]:
        def look(inputs: Sequence[Tensor | None], _: object) -> None:
            gradient = inputs[index] if index < len(inputs) else None
            if gradient is not None:
                self._flags.append((edge, gradient.detach().any()))

        return look

    def moved(self) -> tuple[set[Place], set[Edge]]:
        """What this batch may decide. Waits for the device."""
        places = {place for place, values in self._seen.items() if _differ(values, self.places[place])}
        edges = {edge for edge, flag in self._flags if bool(flag)}
        return places, edges


def is_same(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether a tensor without rows has one value in the batch and in all of its micro-batches."""
    return whole.is_floating_point() and all(
        torch.equal(part.detach().nan_to_num(), whole.detach().nan_to_num()) for part in parts
    )


def edges_without_gradient(loss: Tensor, differentiate: Callable[[], Any]) -> tuple[Any, set[Edge]]:
    """What ``differentiate()`` gives, and through which edges of the graph of ``loss`` it sent nothing but zeros."""
    found: set[Edge] = set()

    def hook(way: tuple[int, ...], name: str) -> Callable[[Any, Any], None]:
        def look(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
            if any(gradient is not None and bool(gradient.any()) for gradient in outputs):
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


def _nodes(loss: Tensor) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Those of the graph behind ``loss`` that have inputs, each by its first way."""
    seen: set[object] = set()
    waiting: list[tuple[tuple[int, ...], Any]] = [((), loss.grad_fn)]
    while waiting and len(seen) < MOST_NODES:
        way, node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.next_functions:
            yield way, node
        waiting += [((*way, index), following) for index, (following, _) in enumerate(node.next_functions)]


def _node_at(loss: Tensor, way: Sequence[int]) -> Any:
    node: Any = loss.grad_fn
    for index in way:
        if node is None or index >= len(node.next_functions):
            return None
        node = node.next_functions[index][0]
    return node


def _differ(values: Sequence[Tensor], was_zero: bool) -> bool:
    if was_zero and any(bool(value.any()) for value in values):
        return True
    return any(not torch.equal(value.nan_to_num(), values[0].nan_to_num()) for value in values[1:])
