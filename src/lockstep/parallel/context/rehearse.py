"""Whether a block mixes positions outside of attention: it is run on some positions, and on each half of them.

Attention is replaced by something that works on single positions. A block that mixes no positions otherwise then gives
for each half what it gives for all; anything else, however it is written, shows. Random numbers are given as
hidden states, the same on all ranks, so that all come to the same result.

``Judge`` does it with the first call of each block, and decides of what was suspected in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.comm.tree import Kwargs, map_leaves, tensor_leaves
from lockstep.errors import LockstepError
from lockstep.model.blocks import settings
from lockstep.model.contents import saved
from lockstep.parallel.context.arguments import sequence_dim
from lockstep.parallel.context.checks import InBlock
from lockstep.parallel.determinism import WithoutChance, numbers, without_constants, without_dropout
from lockstep.runtime import failure
from lockstep.runtime.seed import generators_kept
from lockstep.torch_internals import kernels
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.dispatch import TorchFunction

POSITIONS = 16
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
TOLERANCE_OF_TF32 = 1e-3


@dataclass(frozen=True)
class BlockCall:
    """A call of a block: its arguments by name or place, and the shape of its hidden states."""

    block: str
    forward: Callable[..., object]
    args: list[tuple[str, object]]
    kwargs: dict[str, object]
    hidden: Tensor


@dataclass(frozen=True)
class Verdict:
    """``is_known``: the block could be run on parts. ``mixing``: the first operation that mixes positions.
    ``suspected``: functions of attention by hand, whose shapes follow the number of positions."""

    is_known: bool
    mixing: str | None = None
    suspected: frozenset[str] = frozenset()


UNKNOWN = Verdict(False)
SCORES = frozenset({"matmul", "__matmul__", "bmm", "baddbmm", "einsum", "softmax", kernels.SOFTMAX})
"""Functions that attention by hand is made of. Its weights may be so far apart that mixing is taken for rounding."""


def rehearse(module: nn.Module, call: BlockCall, suspecting: Callable[[int], InBlock]) -> Verdict:
    """Whether the block mixes positions outside of attention; ``suspecting``: a mode for so many positions."""

    def run(start: int, count: int) -> _BlockRun:
        return _run(call, hidden, start, count, suspecting(count))

    count = min(call.hidden.shape[1], POSITIONS) // 2 * 2
    # Each half has at least two positions: one alone would broadcast against what it does not fit.
    if count < 4 or any(hasattr(inner, "unshard") for inner in module.modules() if inner is not module):
        return UNKNOWN
    hidden = numbers((call.hidden.shape[0], count, *call.hidden.shape[2:])).to(call.hidden)
    half = count // 2
    try:
        with torch.no_grad(), _left_as_it_was(module):
            whole, again = run(0, count), run(0, count)
            if not _is_slice_of(whole.output, again.output, 0, count):
                # It is random, or changes from call to call.
                return UNKNOWN
            halves = [run(start, half) for start in (0, half)]
    except Exception:
        # A user's forward may raise anything when it gets other lengths.
        return UNKNOWN
    for start, part in zip((0, half), halves, strict=True):
        if not _is_slice_of(whole.output, part.output, start, half):
            return Verdict(True, _first_difference(whole, halves, half))
    # By hand, attention makes shapes that follow the number of positions, and so is suspected in every run.
    suspected = whole.suspected & halves[0].suspected & halves[1].suspected
    return Verdict(True, suspected=suspected & SCORES)


@dataclass
class _BlockRun:
    output: object = None
    operations: list[tuple[str, Tensor]] = field(default_factory=list)
    suspected: frozenset[str] = frozenset()


def _run(call: BlockCall, hidden: Tensor, start: int, count: int, suspecting: InBlock) -> _BlockRun:
    """The block on ``count`` positions of ``hidden`` [b, positions, width] from ``start``; arguments are cut alike."""
    batch, length = call.hidden.shape[:2]

    def cut(name: str, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf is call.hidden:
            return hidden.narrow(1, start, count)
        dim = sequence_dim(call.block, name, leaf, batch, length)
        return leaf if dim is None else leaf.narrow(dim, start, count)

    def cut_leaves(name: str, value: object) -> object:
        return map_leaves(lambda _, leaf: cut(name, leaf), value)

    noted = _BlockRun()
    with suspecting, _Noting(noted.operations):
        noted.output = call.forward(
            *(cut_leaves(name, value) for name, value in call.args),
            **{name: cut_leaves(name, value) for name, value in call.kwargs.items()},
        )
    noted.suspected = frozenset(one.function for one in suspecting.suspicions)
    return noted


class _Noting(TorchFunctionMode):
    """Notes what operations give, and replaces attention."""

    def __init__(self, operations: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(
        self, func: TorchFunction, types: object, args: tuple[object, ...] = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is F.scaled_dot_product_attention:
            return _by_positions(*_three(args, kwargs or {}))
        if func is F.multi_head_attention_forward:
            query, key, value = _three(args, kwargs or {})
            return (query + key.tanh() + value.sin()), None
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) and result else result
        if isinstance(first, Tensor):
            self.operations.append((getattr(func, "__name__", str(func)), first))
        return result


def _three(args: tuple[object, ...], kwargs: Kwargs) -> tuple[Tensor, Tensor, Tensor]:
    names = ("query", "key", "value")
    given = (*args[:3], *(kwargs[name] for name in names[len(args[:3]) :]))
    return given[0], given[1], given[2]


def _by_positions(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In place of attention: of [..., s, d], whose result at a position depends on that position alone."""
    if query.ndim > 3 and query.shape[-3] != key.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    # Keys of another sequence, which is whole.
    if key.shape[-2] != query.shape[-2]:
        key, value = key.mean(-2, keepdim=True), value.mean(-2, keepdim=True)
    # All three take part, so that mixing before any of them shows.
    return value * (1 + query.mean(-1, keepdim=True).tanh()) + key.mean(-1, keepdim=True).tanh()


def _is_slice_of(whole: object, part: object, start: int, count: int) -> bool:
    """Of all tensors [b, positions, ...]; others, such as a balance loss, are those of a rank's positions."""
    expected, found = tensor_leaves(whole), tensor_leaves(part)
    for path, tensor in expected.items():
        other = found.get(path)
        if other is None or tensor.ndim < 3:
            continue
        if tensor.shape[1] < start + count or not _close(tensor.narrow(1, start, count), other):
            return False
    return True


def _close(expected: Tensor, found: Tensor) -> bool:
    """By norm, as sums in another order are rounded otherwise; two NaN are alike."""
    if expected.shape != found.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    tolerance = TOLERANCE.get(expected.dtype, 5e-2)
    if expected.dtype == torch.float32 and (
        expected.is_cuda or torch.get_float32_matmul_precision() != "highest"
    ):
        tolerance = TOLERANCE_OF_TF32
    if torch.is_autocast_enabled(expected.device.type):
        tolerance = 5e-2
    apart = (expected.double() - found.double()).norm()
    return not bool(apart > tolerance * expected.double().norm() + 1e-6)


def _first_difference(whole: _BlockRun, halves: list[_BlockRun], half: int) -> str:
    """The operation after which a half is not the half of all."""
    for number, (name, expected) in enumerate(whole.operations):
        for start, run in zip((0, half), halves, strict=True):
            if number >= len(run.operations):
                return name
            found = run.operations[number][1]
            if expected.ndim != found.ndim:
                return name
            unlike = [d for d in range(found.ndim) if expected.shape[d] != found.shape[d]]
            if not unlike:
                # Not along the positions, as a weight: it mixes only if it differs between halves and whole.
                is_same = start == 0 or _close(halves[0].operations[number][1], found)
                if not is_same and not _close(expected, found):
                    return name
            elif len(unlike) > 1 or (expected.shape[unlike[0]], found.shape[unlike[0]]) != (2 * half, half):
                # Positions are in another dim, [b * positions, ...]: only element counts can be compared.
                if expected.numel() * half != found.numel() * 2 * half:
                    return name
            elif not _close(expected.narrow(unlike[0], start, half), found):
                return name
    return "it"


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """In its own mode, but without chance; then random numbers, buffers and what forwards keep are put back."""
    modules: list[Any] = list(module.modules())
    kept = [(inner, dict(vars(inner))) for inner in modules]
    contents = [
        saved(value)
        for inner in modules
        for name, value in vars(inner).items()
        if name not in torch_modules.OWN_ATTRIBUTES
    ]
    buffers = [saved(buffer) for buffer in module.buffers()]
    registered = [
        (torch_modules.buffers_of(inner), dict(torch_modules.buffers_of(inner))) for inner in modules
    ]
    try:
        for inner in modules:
            # Nobody is to see these calls.
            torch_modules.replace_forward_hooks(inner)
            if hasattr(inner, "capacity_factor"):
                # An expert's room depends on the number of positions.
                inner.capacity_factor = None
        with (
            generators_kept(),
            without_constants(module.parameters()),
            without_dropout(modules),
            WithoutChance(),
        ):
            yield
    finally:
        for inner, before in kept:
            for name in vars(inner).keys() - before.keys():
                del vars(inner)[name]
            vars(inner).update(before)
        for own, before_buffers in registered:
            own.clear()
            own.update(before_buffers)
        for restore in (*buffers, *contents):
            if restore is not None:
                restore()


@dataclass
class Judge:
    """Of one model's blocks. ``verdicts``: of each block that has run, and its settings, which each call compares;
    ``rehearses``: off in some tests."""

    rehearses: bool = True
    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)

    def __call__(self, block: nn.Module, call: BlockCall, mode: InBlock) -> None:
        """Judge the first call of each block that learns, or in which something is suspected.

        Raises:
            UsageError: it mixes positions outside of attention; on all ranks alike.
        """
        if not torch.is_grad_enabled() and not mode.suspicions:
            return
        key = call.block, settings(block)
        verdict = self.verdicts.get(key)
        if verdict is None:
            verdict = rehearse(block, call, mode.of_length) if self.rehearses else UNKNOWN
            self.verdicts[key] = verdict
        if verdict.mixing is not None:
            mode.refuse_suspected(verdict.mixing)
            mode.refuse(
                "mixes positions outside of attention, as a trial run on some positions shows (it begins with "
                f"{verdict.mixing}), but each rank holds only a part of the sequence",
                "Leave this block out with blocks=..., or compute this before or after the blocks",
            )
        for function in verdict.suspected if verdict.is_known else [None]:
            mode.refuse_suspected(function)

    def failed(self, block: Any, call: BlockCall, mode: InBlock, error: Exception) -> None:
        """The first call of a block raises.

        Raises:
            UsageError: maybe because it has a part of the sequence. Errors that are no consequence of that are left.
        """
        if isinstance(error, (LockstepError, torch.OutOfMemoryError)) or failure.is_consequence(error):
            return
        if (call.block, settings(block)) in self.verdicts:
            return
        try:
            mode.refuse_suspected()
            mode.refuse(*_cannot_run(mode, [*call.args, *call.kwargs.items()], error))
        except LockstepError as refusal:
            raise refusal from error


def _cannot_run(mode: InBlock, arguments: list[tuple[str, object]], error: Exception) -> tuple[str, str]:
    """What to say of a block that raises, and what to do."""
    whole = mode.length * mode.layout.size
    uncut = [
        f"{name} {list(leaf.shape)}"
        for name, value in arguments
        for leaf in tensor_leaves(value).values()
        if whole in leaf.shape and mode.length not in leaf.shape
    ]
    beside = f" and the whole of {', '.join(uncut)}" if uncut else ""
    return (
        f"raises {type(error).__name__} ({failure.first_line(error)[:200]}), where this rank has {mode.length} of "
        f"{whole} positions{beside}",
        mode.no_other
        or "Leave this block out with blocks=..., or compute what needs all positions before or after the blocks",
    )
