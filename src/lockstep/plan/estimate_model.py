"""What of a model decides how much memory it needs: elements by dtype, blocks, and what moves at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ElementCounts = Mapping[str, int]
"""Number of elements by the name of their dtype, as torch names it."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Types that a model is cast between; others (quantised weights, indices, masks) stay as they are."""

BITS = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float6_e2m3": 6,
    "float6_e3m2": 6,
    "float4_e2m1": 4,
    "float4_e2m1fn_x2": 8,
    "complex64": 64,
    "complex128": 128,
    "int64": 64,
    "uint64": 64,
    "int32": 32,
    "uint32": 32,
    "int16": 16,
    "uint16": 16,
    "int8": 8,
    "uint8": 8,
    "bool": 8,
}


def added(parts: Iterable[ElementCounts]) -> dict[str, int]:
    """Elements of several parts together."""
    total: dict[str, int] = {}
    for part in parts:
        for dtype, count in part.items():
            total[dtype] = total.get(dtype, 0) + count
    return total


def nbytes_of(elements: ElementCounts, dtype: str | None = None) -> int:
    """Return bytes as they are, or with what can be cast in ``dtype``."""
    return sum(
        -(-count * BITS[dtype if dtype is not None and kind in FLOATS else kind] // 8)
        for kind, count in elements.items()
    )


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd keeps of one micro-batch on one rank, by the value of ``activation=``.

    ``inputs``: of those, what ``offload`` takes to the host.
    """

    batch: int
    sequence: int
    none: int
    full: int
    offload: int
    inputs: int

    def nbytes(self, mode: str) -> int:
        size: int = getattr(self, mode)
        return size


@dataclass(frozen=True)
class ModelFacts:
    """A model, counted.

    - ``kind``: ``module``, ``transformers config`` or ``safetensors``.
    - ``parameters``, ``buffers``: each tensor once, also where it is tied. ``trainable``: those that get gradients.
    - ``blocks``: how many; ``block``: parameters of the largest; ``root``: parameters in no block, or in one that
      shares them with the rest of the model.
    - ``groups``: what is moved at once when the model is streamed, by name.
    - ``notes``: what a reader should know of how it was counted.
    """

    name: str
    kind: str
    parameters: ElementCounts
    buffers: ElementCounts
    trainable: int
    blocks: int
    block: int
    root: int
    groups: Mapping[str, ElementCounts]
    notes: tuple[str, ...] = ()
    activations: Mapping[str, Activations] | None = None
    """By the precision of the computation; with `` gathered`` after it under ZeRO, where weights are in 16 bits."""

    @property
    def count(self) -> int:
        """The number of parameters."""
        return sum(self.parameters.values())

    def nbytes(self, dtype: str | None = None) -> int:
        """Return parameters and buffers, as they are or cast to ``dtype``."""
        return nbytes_of(self.parameters, dtype) + nbytes_of(self.buffers, dtype)

    def largest(self, dtype: str | None = None) -> tuple[str, int]:
        """Return name and bytes of the largest group."""
        sizes = {name: nbytes_of(elements, dtype) for name, elements in self.groups.items()}
        name = max(sizes, key=lambda name: sizes[name], default="")
        return name, sizes.get(name, 0)

    @property
    def largest_group(self) -> int:
        """Parameters of the largest group; buffers are counted as such."""
        return min(max((sum(elements.values()) for elements in self.groups.values()), default=0), self.count)

    @property
    def stored(self) -> tuple[str, ...]:
        """The dtypes of its parameters, the most frequent first."""
        return tuple(sorted(self.parameters, key=lambda dtype: -self.parameters[dtype]))
