"""What a rank is about to do in a collective, and whether the ranks' intentions belong together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from lockstep.errors import CollectiveMismatchError, DifferentCallsError
from lockstep.user_call import UserCall, in_different_calls


@dataclass(frozen=True)
class LeafSpec:
    """What is known of a leaf without its values. ``kind`` is the dtype, else the type of a leaf
    that is not a tensor."""

    shape: tuple[int, ...]
    kind: str
    device: str

    def __str__(self) -> str:
        return (
            f"shape {self.shape} {self.kind} on {self.device}" if self.device else f"{self.kind} (no tensor)"
        )


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's call of one collective: operation with its arguments, and the leaves by path."""

    operation: str
    leaves: dict[str, LeafSpec] = field(default_factory=dict)
    user: UserCall = field(default_factory=UserCall)

    @cached_property
    def digest(self) -> int:
        """A number of 63 bits that equal calls share and others, but for a chance of 2^-63, do not."""
        text = repr((self.operation, sorted((path, str(spec)) for path, spec in self.leaves.items())))
        # Without the highest bit, because it travels as an int64.
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    @property
    def line(self) -> str:
        return f" ({self.user.line})" if self.user.line else ""


def leaf_spec(leaf: object, at_least_1d: bool = False) -> LeafSpec:
    if not isinstance(leaf, torch.Tensor):
        return LeafSpec((), type(leaf).__name__, "")
    shape = tuple(leaf.shape) or ((1,) if at_least_1d else ())
    kind = str(leaf.dtype).removeprefix("torch.")
    if leaf.layout is not torch.strided:
        kind += f" {str(leaf.layout).removeprefix('torch.')}"
    return LeafSpec(shape, kind, leaf.device.type)


def tensors_only(operation: str, found: dict[str, object], instead: str) -> TypeError | None:
    """Return the error for the first leaf that is not a dense tensor, if there is one."""
    for path, leaf in found.items():
        if not isinstance(leaf, torch.Tensor):
            return TypeError(
                f"{operation} takes tensors, but {path or 'its argument'} is a {type(leaf).__name__}. Make it a "
                f"tensor, or pass Python objects to {instead}."
            )
        if leaf.layout is not torch.strided:
            return TypeError(
                f"{operation} takes dense tensors, but {path or 'its argument'} has layout {leaf.layout}. "
                "Convert it with .to_dense()."
            )
    return None


def check_same(calls: list[CollectiveCall], free_dim: int | None, any_shape: bool) -> None:
    """Compare the calls of all ranks; each rank does so with the same list.

    ``free_dim`` may differ in size; with ``any_shape`` only the number of dims must be equal.

    Raises:
        CollectiveMismatchError: names the operations or the first leaf in which ranks differ.
        DifferentCallsError: names the calls of the script in which these operations are.
    """
    if len({call.operation for call in calls}) > 1:
        if sentence := in_different_calls({rank: call.user for rank, call in enumerate(calls)}):
            raise DifferentCallsError(sentence)
        raise CollectiveMismatchError(
            "The ranks called different collectives:"
            + rows(f"{call.operation}{call.line}" for call in calls)
            + "\nMake every rank take the same path to its collectives."
        )
    operation = calls[0].operation
    for path in sorted({path for call in calls for path in call.leaves}):
        specs = [call.leaves.get(path) for call in calls]
        if len({fixed_part(spec, free_dim, any_shape) for spec in specs}) > 1:
            allowed = "" if free_dim is None else f" Only the size of dim {free_dim} may differ."
            only_sizes = len({spec and (spec.kind, spec.device, len(spec.shape)) for spec in specs}) == 1
            hint = " Equalise a dim with pad_across_processes." if allowed and only_sizes else ""
            raise CollectiveMismatchError(
                f"{operation}: the ranks differ in {path or 'the tensor'}:"
                + rows(
                    f"{operation} {'nothing there' if spec is None else spec}{call.line}"
                    for spec, call in zip(specs, calls, strict=True)
                )
                + f"\nPass the same structure, shapes and dtypes on every rank.{allowed}{hint}"
            )


def fixed_part(spec: LeafSpec | None, free_dim: int | None, any_shape: bool) -> LeafSpec | None:
    """Return the spec without the sizes that may differ."""
    if spec is None:
        return None
    shape = [-1] * len(spec.shape) if any_shape else list(spec.shape)
    if free_dim is not None and shape:
        shape[free_dim] = -1
    return replace(spec, shape=tuple(shape))


def rows(lines: Iterable[str]) -> str:
    return "".join(f"\n  rank {rank}: {line}" for rank, line in enumerate(lines))
