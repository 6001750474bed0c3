"""What is compared of a run: one item is one tensor of one training step, under a name that both runs give it."""

from __future__ import annotations

import json
from enum import Enum
from typing import NamedTuple


class ItemKind(str, Enum):
    """What a tensor is; in the order in which a step makes them."""

    WEIGHT = "initial weight"
    BATCH = "batch"
    OUTPUT = "output"
    LOSS = "loss"
    OUTPUT_GRADIENT = "gradient of the output"
    GRADIENT = "gradient"
    NORM = "gradient norm"
    CLIPPED = "clipped gradient"
    RATE = "learning rate"
    UPDATE = "update"
    BUFFER = "buffer"

    @property
    def phase(self) -> str:
        """What a training step was doing."""
        return PHASES[self]

    @property
    def is_of_micro_batch(self) -> bool:
        """Whether there is one for each micro-batch, and not one for the step."""
        return self in (ItemKind.BATCH, ItemKind.OUTPUT, ItemKind.LOSS, ItemKind.OUTPUT_GRADIENT)


PHASES = {
    ItemKind.WEIGHT: "before the first step",
    ItemKind.BATCH: "data",
    ItemKind.OUTPUT: "forward",
    ItemKind.LOSS: "forward",
    ItemKind.OUTPUT_GRADIENT: "backward",
    ItemKind.GRADIENT: "backward",
    ItemKind.NORM: "clipping",
    ItemKind.CLIPPED: "clipping",
    ItemKind.RATE: "optimizer",
    ItemKind.UPDATE: "optimizer",
    ItemKind.BUFFER: "optimizer",
}
_ORDER = {kind: place for place, kind in enumerate(ItemKind)}


class TraceItem(NamedTuple):
    """The name of a tensor.

    Attributes:
        step: Optimizer steps from 1; 0: before the first.
        name: Of the module, parameter or buffer, in the whole model.
        micro_batch: Of the step, on each rank with batches of its own; from 0.
        data_rank: Whose batch, where there is one for each; -1: of all.
        call: Which call of the module with this batch; from 0.
        path: Where in a nested value.
    """

    step: int
    kind: ItemKind
    name: str
    micro_batch: int = 0
    data_rank: int = -1
    call: int = 0
    path: str = ""

    @property
    def key(self) -> str:
        """The item as text."""
        return json.dumps([self.step, self.kind.value, *self[2:]])

    @classmethod
    def from_key(cls, key: str) -> TraceItem:
        """Return the item of a ``key``."""
        step, kind, *others = json.loads(key)
        return cls(step, ItemKind(kind), *others)

    def order(self, position: int) -> tuple[int, ...]:
        """Sorts items as one process would come to them. ``position``: that among items of its step and kind."""
        phase = _ORDER[self.kind]
        if self.kind.is_of_micro_batch:
            # Gradients of outputs come behind all of the forward, in the order in which the run came to them.
            backward = int(self.kind is ItemKind.OUTPUT_GRADIENT)
            return self.step, 0, self.micro_batch, backward, position if backward else 0, phase, position
        return self.step, 1, 0, 0, 0, phase, position

    def __str__(self) -> str:
        what = f"{self.kind.value} of {self.name}" if self.name else self.kind.value
        return f"step {self.step}, {self.kind.phase}: {what}{f' [{self.path}]' if self.path else ''}"
