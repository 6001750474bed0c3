"""Gradients of a rehearsal: those of the ranks together must be those of the whole run.

What ranks hold parts of has its part of the gradient. What is whole has the gradient of the whole run on each rank,
once gradients are summed over the ranks where whole operands met features; parameters of modules that work on a
rank's features alone have it as the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.parallel.tensor.communication import part_of_pieces
from lockstep.parallel.tensor.rehearsal_run import Run

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


class GradientsDifferError(Exception):
    """They are not."""


def meetings(whole: Run, parts: Sequence[Run]) -> tuple[tuple[str, ...], bool]:
    """(modules that work on a rank's features alone and whose gradients are partial sums, whether others meet them).

    Raises:
        GradientsDifferError: no sum over the ranks gives the gradients of the whole run.
    """
    ranks = len(parts)
    seeds = [
        torch.randn(given.shape, generator=torch.Generator().manual_seed(20 + number)).to(given)
        for number, given in enumerate(whole.given)
    ]
    expected = _gradients(whole.given, [*whole.parts.values(), *whole.sources.values()], seeds)
    of_parts = dict(zip(whole.parts, expected, strict=False))
    of_sources = dict(zip(whole.sources, expected[len(whole.parts) :], strict=True))
    direct: list[dict[str, Tensor | None]] = []
    sums: list[Tensor] = []
    for rank, run in enumerate(parts):
        if len(run.taken) != len(parts[0].taken):
            raise GradientsDifferError("whole tensors meet its features in ways that differ between ranks")
        wanted = [*run.parts.values(), *(leaf for _, leaf in run.taken), *run.sources.values()]
        own = [seed.chunk(ranks, dim=-1)[rank] for seed in seeds]
        found = _gradients(run.given, wanted, own)
        for name, gradient in zip(run.parts, found, strict=False):
            _check_part(name, gradient, of_parts[name], whole, rank, ranks)
        taken = found[len(run.parts) : len(run.parts) + len(run.taken)]
        filled = [_filled(g, leaf) for g, (_, leaf) in zip(taken, run.taken, strict=True)]
        sums = [a + b for a, b in zip(sums, filled, strict=True)] if sums else filled
        direct.append(dict(zip(run.sources, found[len(run.parts) + len(run.taken) :], strict=True)))
    return _check_sources(parts, direct, sums, of_sources)


def _check_part(
    name: str, gradient: Tensor | None, expected: Tensor | None, whole: Run, rank: int, ranks: int
) -> None:
    if expected is None:
        if gradient is not None and bool(gradient.any()):
            raise GradientsDifferError("gradients of its features depend on which a rank has")
        return
    if name in whole.pieces:
        own = part_of_pieces(expected, whole.pieces[name], rank, ranks)
    else:
        own = expected.chunk(ranks, dim=-3)[rank]
    if gradient is None or not _close(gradient, own):
        raise GradientsDifferError("gradients of its features depend on each other, as running it shows")


def _check_sources(
    parts: Sequence[Run],
    direct: Sequence[dict[str, Tensor | None]],
    sums: Sequence[Tensor],
    expected: dict[str, Tensor | None],
) -> tuple[tuple[str, ...], bool]:
    alone = {name for name in parts[0].on_parts if all(run.on_parts.get(name) for run in parts)}
    meets = any(_owners(operand, parts[0]) - alone for operand, _ in parts[0].taken)
    partial: set[str] = set()
    for rank, run in enumerate(parts):
        operands = [operand for operand, _ in run.taken]
        through = dict(zip(run.sources, _gradients(operands, list(run.sources.values()), sums), strict=True))
        for name, tensor in run.sources.items():
            total = _filled(through[name], tensor)
            owner = name.rpartition(".")[0]
            if owner in alone and not meets:
                total = total + sum(_filled(one[name], tensor) for one in direct)
                if bool(total.any()):
                    partial.add(owner)
            else:
                total = total + _filled(direct[rank][name], tensor)
            if not _close(total, _filled(expected[name], tensor)):
                raise GradientsDifferError(f"no sum over the ranks gives the gradient of {_named(name)}")
    return tuple(sorted(partial)), meets


def _owners(operand: Tensor, run: Run) -> set[str]:
    """Of what it was computed from."""
    found = _gradients([operand], list(run.sources.values()), [torch.ones_like(operand)])
    return {
        name.rpartition(".")[0]
        for name, gradient in zip(run.sources, found, strict=True)
        if gradient is not None
    }


def _gradients(of: Sequence[Tensor], to: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor | None]:
    used = [(tensor, seed) for tensor, seed in zip(of, seeds, strict=True) if tensor.requires_grad]
    if not used:
        return [None] * len(to)
    outputs, given = zip(*used, strict=True)
    found = torch.autograd.grad(outputs, to, given, retain_graph=True, allow_unused=True)
    return list(found)


def _filled(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _close(found: Tensor, expected: Tensor) -> bool:
    """By norm: sums in another order are rounded otherwise."""
    if found.shape != expected.shape:
        return False
    tolerance = TOLERANCE.get(found.dtype, 5e-2)
    apart = (found.double() - expected.double()).norm()
    return bool(apart <= tolerance * expected.double().norm() + 1e-6)


def _named(source: str) -> str:
    if not source:
        return "its input"
    return "its output layer's result" if source.startswith("row ") else f"'{source}'"
