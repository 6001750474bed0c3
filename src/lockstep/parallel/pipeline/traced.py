"""What the trace of a model shows: what passes between its stages, where it comes from and how it is used.

A *segment* is the code from the call of a stage's first block to the call of the next stage's first block; the
first one begins with the forward, the last one ends with it (and with the loss). Each stage runs its segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lockstep.comm.tree import map_leaves
from lockstep.torch_internals import tensors as torch_tensors

RECEIVED = ""
"""Stands among the names of the last stage's blocks for all that it receives."""


@dataclass(frozen=True)
class TensorMeta:
    """What is known of a tensor before it is there."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        return TensorMeta(tensor.shape, tensor.dtype, tensor.requires_grad)


@dataclass(frozen=True)
class Source:
    """Where the stage before a cut finds what is sent: in what a block returns (``path``), in an attribute (``path``)
    of the module ``name``, in what a function made behind the block ``name``, or among what it received.

    ``path``: the leaf, or the name of the attribute; ``number``: the call of the function, or the place among what was
    received.
    """

    kind: Literal["output", "attribute", "function", "received"]
    name: str = ""
    path: str = ""
    function: str = ""
    number: int = 0

    def __str__(self) -> str:
        if self.kind == "output":
            return f"what the block '{self.name}' returns" + (f" at {self.path}" if self.path else "")
        if self.kind == "attribute":
            return f"the attribute '{self.name}.{self.path}'"
        where = f"behind the block '{self.name}'" if self.name else "before the blocks"
        return f"the result of {self.function} {where}"


@dataclass(frozen=True)
class Fetch:
    """The first use of a received tensor in a stage: its number among what is received, and which function uses it."""

    number: int
    by: str
    ndim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Cut:
    """What a stage receives: the arguments of its first block that depend on earlier stages, and what else it uses, or
    stages after it.

    ``paths``: of the leaves of (args, kwargs), one for each tensor; ``sources``: of the rest, in the stage before.
    ``kinds``: of both.
    """

    block: str
    paths: tuple[str, ...] = ()
    kinds: tuple[TensorMeta, ...] = ()
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class StageUse:
    """How a stage uses what it receives outside of the call of its first block. ``within``: inside of blocks too."""

    fetches: tuple[Fetch, ...] = ()
    between: bool = False
    within: bool = False


@dataclass
class ModelTrace:
    """What a run showed.

    Attributes:
        cuts: ``cuts[s]`` is before stage s; the first is empty.
        output: Of the model.
        uses: Name of a parameter outside of blocks -> the segments that use it.
        results: Block -> its output, of which leaves are placeholders, or ``Argument`` where they came in unchanged.
        shapes: Block -> path in its output -> shape of the tensor there.
        parts: Name of a module outside of blocks -> (segment, result) of its calls.
        early: Paths of outputs that an earlier segment than the last made.
    """

    cuts: list[Cut]
    stages: list[StageUse] = field(default_factory=list)
    output: object = None
    uses: dict[str, set[int]] = field(default_factory=dict)
    results: dict[str, object] = field(default_factory=dict)
    shapes: dict[str, dict[str, torch.Size]] = field(default_factory=dict)
    parts: dict[str, list[tuple[int, object]]] = field(default_factory=dict)
    early: list[str] = field(default_factory=list)


class Argument:
    """A leaf of a block's output that is the argument at ``path``, unchanged. No dataclass, which would be no leaf."""

    def __init__(self, path: str) -> None:
        self.path = path


def marked(result: object, given: Mapping[str, object]) -> object:
    """Return ``result`` with an ``Argument`` in the place of each tensor that is a leaf of ``given``."""
    paths = {id(leaf): path for path, leaf in given.items() if isinstance(leaf, Tensor)}
    return map_leaves(lambda _, leaf: Argument(paths[id(leaf)]) if id(leaf) in paths else leaf, result)


def repeated(result: object, given: Mapping[str, object], new: Callable[[Tensor], Tensor]) -> object:
    """Return ``result`` for another call: an ``Argument`` is its leaf of ``given``, a tensor ``new(tensor)``."""
    made: dict[int, Tensor] = {}

    def again(_: str, leaf: object) -> object:
        if isinstance(leaf, Argument):
            return given[leaf.path]
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = new(leaf)
        return made[id(leaf)]

    return map_leaves(again, result)


def storage_of(tensor: Tensor) -> int:
    """Return the same for a tensor and its views."""
    try:
        return torch_tensors.storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        # Sparse tensors and wrappers have no storage of their own.
        return id(tensor)
