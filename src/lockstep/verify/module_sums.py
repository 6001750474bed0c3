"""What comes into each module and out of it in a forward, and the gradients of both, as sums that parts add up to.

Means over rows are the same of a whole tensor and of all its equal parts together, whether it is cut by samples or by
positions; those over elements also if it is cut by features. So they can be compared between a split model and the
whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lockstep.comm.dtensor import local
from lockstep.comm.tree import leaves
from lockstep.model.contents import is_ours
from lockstep.torch_internals import autograd as torch_autograd

TOLERANCE = 1e-4
ModuleEvent = tuple[str, str]
"""(name of a module, kind): ``input``, ``output``, ``input gradient`` or ``output gradient``."""


@dataclass
class Sums:
    """Of all tensors of one kind: elements, their sum and squares; rows of ``width``, and squares of a product of each
    with one vector."""

    elements: int = 0
    total: float = 0.0
    squares: float = 0.0
    rows: int = 0
    products: float = 0.0
    width: int = 0

    def add(self, other: Sums) -> None:
        """Count both; of rows of several widths there is none."""
        self.width = other.width if not self.elements or self.width == other.width else 0
        self.elements += other.elements
        self.total += other.total
        self.squares += other.squares
        self.rows += other.rows
        self.products += other.products

    def differs(self, other: Sums) -> bool:
        """Return whether the means differ by more than rounding explains."""
        if not self.elements or not other.elements:
            return bool(self.elements) != bool(other.elements)
        # Root mean squares are the scale: a mean may be near zero because signs cancel.
        mine, theirs = (self.squares / self.elements) ** 0.5, (other.squares / other.elements) ** 0.5
        scale = TOLERANCE * max(mine, theirs)
        if (
            abs(mine - theirs) > scale
            or abs(self.total / self.elements - other.total / other.elements) > scale
        ):
            return True
        if self.width != other.width or self.width <= 0:
            return False
        # Products of rows with the vector are about the root of the width larger than elements.
        left, right = (self.products / self.rows) ** 0.5, (other.products / other.rows) ** 0.5
        return abs(left - right) > scale * self.width**0.5


def sums_of(tensor: Tensor) -> Sums:
    """Sum a tensor [..., width], or this rank's part of it: its elements, and by their place along the width."""
    part = local(tensor.detach()).double()
    if not part.numel():
        return Sums()
    width = part.shape[-1] if part.ndim else 1
    rows = part.reshape(-1, width)
    places = torch.arange(width, device=part.device, dtype=torch.float64)
    # Sums do not change when elements change places; products with another number for each column do.
    products = rows @ torch.sin(places * places * 0.37 + places + 1)
    return Sums(
        part.numel(),
        part.sum().item(),
        part.square().sum().item(),
        rows.shape[0],
        products.square().sum().item(),
        width,
    )


@dataclass
class Observed:
    """Events in the order in which they first came; ``passed_on``: modules that get an input of one around them."""

    events: dict[ModuleEvent, Sums] = field(default_factory=dict)
    passed_on: set[str] = field(default_factory=set)

    def add(self, name: str, kind: str, tensor: Tensor) -> None:
        """Count ``tensor``, of any shape."""
        self.events.setdefault((name, kind), Sums()).add(sums_of(tensor))


@contextmanager
def observed(model: nn.Module | None) -> Iterator[Observed]:
    """Observe what modules of ``model`` do inside; without one, nothing."""
    found = Observed()
    entered: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules() if model is not None else ():
        # It stands for a block of another rank.
        if is_ours(module):
            continue
        handles.append(module.register_forward_pre_hook(_before(found, name, entered), with_kwargs=True))
        handles.append(module.register_forward_hook(_after(found, name, entered)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Observations:
    """Those of the split model, one for each rank, and that of the whole one."""

    ranks: Sequence[Observed]
    whole: Observed

    def differ(self, event: ModuleEvent) -> bool:
        """Return whether all ranks' parts together, or the copy of one of them, are not the whole's."""
        expected = self.whole.events.get(event)
        parts = [rank.events[event] for rank in self.ranks if event in rank.events]
        if expected is None or not parts:
            return False
        together = Sums()
        for sums in parts:
            together.add(sums)
        # Whoever has as many elements as the whole holds a copy of it.
        copies = (sums for sums in parts if sums.elements == expected.elements)
        return together.differs(expected) or any(sums.differs(expected) for sums in copies)

    def order(self) -> dict[str, int]:
        """Place of each module by the end of its first call."""
        names = [name for name, kind in self.whole.events if kind == "output"]
        return {name: place for place, name in enumerate(names)}

    def first_forward(self) -> str | None:
        """Return the module in whose own forward the first other number is made."""
        for name, kind in self.whole.events:
            if kind in ("input", "output") and self.differ((name, kind)):
                return name if kind == "output" or not name else self._caller(name)
        return None

    def last_backward(self, wrong: Iterable[str]) -> str | None:
        """Return the module whose own backward makes the first other gradient; ``wrong``: owners of wrong gradients."""
        order = self.order()
        owner = max(wrong, key=lambda name: order.get(name, -1), default=None)
        if owner is not None and self.differ((owner, "output gradient")):
            owner = self._caller(owner)
        found = [name for name in order if name not in self.whole.passed_on and self._turns_wrong(name)]
        # The innermost modules that get the right gradient and pass on a wrong one.
        inner = [name for name in found if not any(_is_inside(other, name) for other in found)]
        if not inner:
            return owner
        # Backward comes to the last of them first.
        return owner if owner is not None and _is_inside(owner, inner[-1]) else inner[-1]

    def _caller(self, name: str) -> str:
        """Return the module around it that has a forward."""
        name = name.rpartition(".")[0]
        while name and (name, "output") not in self.whole.events:
            name = name.rpartition(".")[0]
        return name

    def _turns_wrong(self, name: str) -> bool:
        comes, goes = (name, "output gradient"), (name, "input gradient")
        return comes in self.whole.events and not self.differ(comes) and self.differ(goes)


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _tensors(value: object) -> list[Tensor]:
    return [
        leaf
        for leaf in leaves(value).values()
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and _has_values(leaf)
    ]


def _has_values(tensor: Tensor) -> bool:
    """Unlike those of a forward that only looks at shapes."""
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")


def _before(found: Observed, name: str, entered: dict[str, list[Tensor]]) -> object:
    def hook(module: nn.Module, args: object, kwargs: object) -> None:
        # Checkpointing repeats a forward in backward; it counts once.
        if torch_autograd.is_in_backward():
            return
        tensors = _tensors((args, kwargs))
        # The gradient of a tensor that a module around this one has got too is that of all its uses.
        around = [tensor for other, inputs in entered.items() if _is_inside(name, other) for tensor in inputs]
        if any(tensor is other for tensor in tensors for other in around):
            found.passed_on.add(name)
        entered[name] = tensors
        for tensor in tensors:
            found.add(name, "input", tensor)
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(lambda gradient: found.add(name, "input gradient", gradient))

    return hook


def _after(found: Observed, name: str, entered: dict[str, list[Tensor]]) -> object:
    def hook(module: nn.Module, args: object, output: object) -> None:
        if torch_autograd.is_in_backward():
            return
        entered.pop(name, None)
        for tensor in _tensors(output):
            found.add(name, "output", tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: found.add(name, "output gradient", gradient))

    return hook
