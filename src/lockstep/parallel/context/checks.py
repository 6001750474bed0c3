"""Calls inside a split sequence that would silently see only this rank's positions, or take them for the first ones.

A torch function mode sees every call of torch's API in the forward of a model or block. By names and lengths alone it
can only suspect: numbers of experts or heads may equal the length. In blocks ``rehearse`` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.comm.tree import Kwargs
from lockstep.errors import UsageError
from lockstep.parallel.context.layout import SequenceLayout
from lockstep.torch_internals.dispatch import TorchFunction


@dataclass(frozen=True)
class Suspicion:
    """A call of ``function`` that seems to need other ranks' positions; ``what`` and ``remedy`` as in ``refuse``."""

    function: str
    what: str
    remedy: str


class OnChunks(TorchFunctionMode):
    """Active within the forward of ``where``, in which each rank has ``length`` positions of the sequence.

    Refuses positions that are counted from 0, as if the chunk were the whole.
    """

    def __init__(self, where: str, layout: SequenceLayout, length: int) -> None:
        super().__init__()
        self.where, self.layout, self.length = where, layout, length
        self.calls: object = None
        """The function that is checked now."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: tuple[object, ...] = (), kwargs: Kwargs | None = None
    ) -> object:
        check = _POSITIONS.get(func)
        if check is not None:
            self.calls = func
            check(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def suspect(self, what: str, remedy: str) -> None:
        """The call that is made now seems to need other ranks' positions."""
        self.refuse(what, remedy)

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raise UsageError."""
        end = "" if remedy.endswith("...") else "."
        raise UsageError(f"{self.where} {what} (context parallelism, cp = {self.layout.size}). {remedy}{end}")


class InBlock(OnChunks):
    """Active within the forward of ``block``: what mixes positions, other than attention, is suspected too."""

    def __init__(self, block: str, layout: SequenceLayout, batch: int, length: int, no_other: str) -> None:
        super().__init__(f"Block '{block}'", layout, length)
        self.block = block
        self.batch = batch
        self.no_other = no_other
        self.suspicions: list[Suspicion] = []

    def __torch_function__(
        self, func: TorchFunction, types: object, args: tuple[object, ...] = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        check = _CHECKS.get(func)
        if check is not None:
            self.calls = func
            check(self, *args, **kwargs)
        result = func(*args, **kwargs)
        if func in _PRODUCTS:
            self.calls = func
            self._check_scores(args, result)
        return result

    def suspect(self, what: str, remedy: str) -> None:
        """Noted: the rehearsal of the block decides."""
        self.suspicions.append(Suspicion(getattr(self.calls, "__name__", ""), what, remedy))

    def of_length(self, length: int) -> InBlock:
        """One for a call with so many positions."""
        return InBlock(self.block, self.layout, self.batch, length, self.no_other)

    def refuse_suspected(self, function: str | None = None) -> None:
        """Raise UsageError if a call of ``function``, or of any, was suspected."""
        for one in self.suspicions:
            if function in (None, one.function):
                self.refuse(one.what, one.remedy)

    def _check_scores(self, factors: tuple[object, ...], result: Tensor) -> None:
        """Weights are matrices, so that a product with one of them has no scores, whatever its width."""
        tensors = [factor for factor in factors if isinstance(factor, Tensor)]
        if all(tensor.ndim > 2 for tensor in tensors) and result.shape[-2:] == (self.length, self.length):
            self.suspect_scores(f"a product of matrices [..., {self.length}, {self.length}]")

    def suspect_scores(self, what: str) -> None:
        self.suspect(
            f"has {what}, which looks like attention computed by hand. It would use only the {self.length} of "
            f"{self.length * self.layout.size} positions that this rank holds",
            self.no_other or 'Use F.scaled_dot_product_attention (transformers: attn_implementation="sdpa")',
        )

    def has_positions(self, tensor: Tensor) -> bool:
        """Whether it is [b, positions of this rank, ...]."""
        return (
            isinstance(tensor, Tensor) and tensor.ndim > 2 and tensor.shape[:2] == (self.batch, self.length)
        )


# -- the calls ------------------------------------------------------------------


def _check_softmax(mode: InBlock, tensor: Tensor, *_: object, **__: object) -> None:
    if isinstance(tensor, Tensor) and tensor.ndim > 2 and tensor.shape[-2:] == (mode.length, mode.length):
        mode.suspect_scores(f"a softmax over {list(tensor.shape)}")


def _check_arange(mode: OnChunks, *args: object, **kwargs: object) -> None:
    # arange(end), arange(start, end) or arange(start, end, step)
    numbers = [number for number in args if isinstance(number, int)]
    start = kwargs.get("start", numbers[0] if len(numbers) > 1 else 0)
    end = kwargs.get("end", numbers[1] if len(numbers) > 1 else numbers[0] if numbers else None)
    if start == 0 and end == mode.length and kwargs.get("step", numbers[2] if len(numbers) > 2 else 1) == 1:
        mode.suspect(
            f"calls torch.arange({mode.length}), which looks like positions, but this rank holds {mode.length} "
            f"of {mode.length * mode.layout.size} positions, and not the first ones",
            "Compute position numbers before the blocks, and pass them, or what you compute from them, to the "
            "blocks as arguments",
        )


def _check_table(mode: OnChunks, tensor: Tensor, index: object) -> None:
    """``table[:length]`` of a longer table of positions, whatever dimension but the last they are in."""
    if not isinstance(tensor, Tensor) or mode.length in tensor.shape[1:-1]:
        # It has this rank's positions.
        return
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is Ellipsis or part is None for part in parts):
        return
    for dim, part in enumerate(parts[: max(tensor.ndim - 1, 1)]):
        if not isinstance(part, slice) or not isinstance(part.stop, int) or part.step not in (None, 1):
            continue
        if part.stop == mode.length < tensor.shape[dim] and part.start in (None, 0):
            mode.suspect(
                f"takes the first {mode.length} of {tensor.shape[dim]} rows of {list(tensor.shape)}, which looks like "
                "a table of positions, but this rank holds others",
                "Select these rows before the blocks, and pass them to the blocks as arguments",
            )


def _check_reduction(mode: InBlock, tensor: Tensor, *args: object, **kwargs: object) -> None:
    named = [kwargs[name] for name in ("dim", "dims") if name in kwargs]
    given = named or [
        arg for arg in args[:1] if isinstance(arg, (int, list, tuple)) and not isinstance(arg, bool)
    ]
    _refuse_along_sequence(mode, tensor, given)


def _check_flip(mode: InBlock, tensor: Tensor, *args: object, **kwargs: object) -> None:
    _refuse_along_sequence(mode, tensor, [*args, *kwargs.values()])


def _check_roll(mode: InBlock, tensor: Tensor, *args: object, **kwargs: object) -> None:
    _refuse_along_sequence(mode, tensor, [kwargs.get("dims", args[1] if len(args) > 1 else 1)])


def _refuse_along_sequence(mode: InBlock, tensor: Tensor, dims: list[object]) -> None:
    flat = [dim for given in dims for dim in (given if isinstance(given, (list, tuple)) else [given])]
    if mode.has_positions(tensor) and any(isinstance(dim, int) and dim % tensor.ndim == 1 for dim in flat):
        mode.suspect(
            f"works on {list(tensor.shape)} along dim 1, the sequence, of which this rank holds {mode.length} of "
            f"{mode.length * mode.layout.size} positions",
            "Leave this module out with blocks=..., or compute this before or after the blocks",
        )


def _check_convolution(mode: InBlock, tensor: Tensor, weight: Tensor, *_: object, **__: object) -> None:
    if isinstance(weight, Tensor) and any(size > 1 for size in weight.shape[2:]):
        mode.suspect(
            f"has a convolution with a kernel of {list(weight.shape[2:])}, which would need the neighbours of this "
            "rank's positions",
            "Leave this module out with blocks=...",
        )


def _check_recurrence(mode: InBlock, *_: object, **__: object) -> None:
    mode.suspect(
        "has a recurrent layer, which would start again at the first position of each rank",
        "Leave this module out with blocks=...",
    )


def _functions(names: str, *places: object) -> set[object]:
    return {getattr(place, name) for name in names.split() for place in places if hasattr(place, name)}


_PRODUCTS = _functions("matmul __matmul__ bmm baddbmm einsum", torch, Tensor)
_POSITIONS: dict[object, Callable[..., None]] = {
    **dict.fromkeys(_functions("arange", torch), _check_arange),
    **dict.fromkeys(_functions("__getitem__", Tensor), _check_table),
}
_CHECKS: dict[object, Callable[..., None]] = {
    **dict.fromkeys(_functions("softmax _softmax", torch, Tensor, F, torch.special), _check_softmax),
    **_POSITIONS,
    **dict.fromkeys(
        _functions(
            "mean sum prod amax amin max min std var median logsumexp cumsum cumprod cummax cummin logcumsumexp sort "
            "argsort argmax argmin",
            torch,
            Tensor,
        ),
        _check_reduction,
    ),
    **dict.fromkeys(_functions("roll", torch, Tensor), _check_roll),
    **dict.fromkeys(_functions("flip", torch, Tensor), _check_flip),
    **dict.fromkeys(_functions("conv1d conv2d conv3d", torch, F), _check_convolution),
    **dict.fromkeys(_functions("lstm gru rnn_tanh rnn_relu", torch), _check_recurrence),
}
