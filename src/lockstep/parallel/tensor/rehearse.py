"""Whether a module may be split: it is run on random numbers, whole and as each rank would.

Between its column layers and its row layer a module must treat the ranks' features apart from each other: an
elementwise function, or attention by heads. What it does cannot be read from its shapes. So the outputs of
its column layers are replaced by random ones, and what reaches the row layer is compared: the part of the
whole run that belongs to a rank must be what a run with that rank's share gives. No weights of the layers
are used, and nothing is sent.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.tensor.communication import part_of_pieces
from lockstep.parallel.tensor.plan import PACKED, features
from lockstep.parallel.tensor.width import ReportedWidth
from lockstep.torch_internals import modules as torch_modules

BATCH, LENGTH = 2, 4
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Rehearsal:
    """``module`` with its column layers (name in it -> style) and its row layer, for ``ranks`` ranks.

    ``holder``: name in ``module`` of the one whose ``attributes`` are set and whose input reports a width.
    """

    module: nn.Module
    columns: Mapping[str, str]
    row: str
    ranks: int
    holder: str = ""


@dataclass(frozen=True)
class Passed:
    """``partial``: names of modules inside that work on parts, so that gradients of theirs are partial sums."""

    partial: tuple[str, ...] = ()


class Different(str):
    """Why it may not be split, seen as it ran; any other text tells why it could not be run."""


def rehearse(
    rehearsal: Rehearsal, attributes: Mapping[str, int] | None = None, reports_width: bool = False
) -> Passed | str:
    """Passed, or why not."""
    reason = _own_parameters(rehearsal)
    if reason:
        return reason
    for call in _CALLS:
        try:
            return _compare(rehearsal, attributes or {}, reports_width, call)
        except _DifferentError as error:
            return Different(error)
        except Exception as error:  # whatever a user's forward raises
            text = str(error).strip().splitlines()
            reason = reason or f"running it raised {type(error).__name__}" + (
                f" ({text[0][:60]})" if text else ""
            )
    return reason


def _with_rotary(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """For attention of transformers: cosine and sine of each position, here of no rotation."""
    width = next((getattr(m, "head_dim", None) for m in module.modules() if hasattr(m, "head_dim")), None)
    if not isinstance(width, int):
        raise TypeError("no head_dim")
    ones = x.new_ones(1, LENGTH, width)
    return {"position_embeddings": (ones, torch.zeros_like(ones)), "attention_mask": None}


def _own_parameters(rehearsal: Rehearsal) -> str:
    """Of what is around the layers: nobody can see whether such parameters are used on parts."""
    for name, inner in rehearsal.module.named_modules():
        is_around = not name or name == rehearsal.holder or rehearsal.row.startswith(f"{name}.")
        own = [key for key, parameter in torch_modules.parameters_of(inner).items() if parameter is not None]
        if is_around and own:
            return f"it has parameters of its own ({', '.join(own)})"
    return ""


def _alone(module: nn.Module, x: Tensor) -> dict[str, Any]:
    return {}


_CALLS = (_alone, _with_rotary)


class _ReachedError(Exception):
    """The row layer was called."""


class _DifferentError(Exception):
    """The ranks' parts are not those of the whole."""


def _compare(rehearsal: Rehearsal, attributes: Mapping[str, int], reports_width: bool, call: Any) -> Passed:
    layers = {name: rehearsal.module.get_submodule(name) for name in rehearsal.columns}
    first = next(iter(layers.values()))
    weight: Any = torch_modules.parameters_of(first)["weight"]
    device = torch.device("cpu") if weight.device.type == "meta" else weight.device
    numbers = torch.Generator().manual_seed(0)

    def draw(width: int) -> Tensor:
        return torch.randn(BATCH, LENGTH, width, generator=numbers).to(device, weight.dtype)

    x = draw(features(first)[0])
    outputs = {name: draw(features(layer)[1]) for name, layer in layers.items()}
    whole, calls = _run(rehearsal, {}, x, outputs, call)
    ranks = rehearsal.ranks
    partial: set[str] = set()
    for rank, expected in enumerate(whole.chunk(ranks, dim=-1)):
        given = {
            name: part_of_pieces(output, PACKED.get(rehearsal.columns[name], 1), rank, ranks)
            for name, output in outputs.items()
        }
        reported = ReportedWidth.of(x, x.shape[-1] // ranks) if reports_width else x
        got, rank_calls = _run(rehearsal, attributes, reported, given, call)
        tolerance = TOLERANCE.get(got.dtype, 2e-2)
        if got.shape != expected.shape or not torch.allclose(got, expected, tolerance, tolerance):
            raise _DifferentError("its features depend on each other, as running it shows")
        partial |= {name for name, shapes in rank_calls.items() if shapes != calls.get(name)}
    return Passed(tuple(sorted(partial)))


@torch.no_grad()
def _run(
    rehearsal: Rehearsal, attributes: Mapping[str, int], x: Tensor, outputs: Mapping[str, Tensor], call: Any
) -> tuple[Tensor, dict[str, list[torch.Size]]]:
    """(what the row layer is given, shapes of what modules with parameters are given)."""
    module = _without_weights(rehearsal)
    holder = module.get_submodule(rehearsal.holder)
    for name, value in attributes.items():
        setattr(holder, name, value)
    if isinstance(x, ReportedWidth) and rehearsal.holder:
        holder.register_forward_pre_hook(
            lambda _, args: tuple(
                ReportedWidth.of(a, x.width) if getattr(a, "shape", None) == x.whole.shape else a
                for a in args
            )
        )
        x = x.whole
    called: dict[str, list[torch.Size]] = {}
    reached: list[Tensor] = []

    def stop(given: Tensor, *_: Any, **__: Any) -> Any:
        reached.append(given)
        raise _ReachedError

    for name, inner in module.named_modules():
        if name in outputs:
            inner.forward = lambda *_, _output=outputs[name], **__: _output
        elif name == rehearsal.row:
            inner.forward = stop
        elif next(inner.parameters(recurse=False), None) is not None:
            inner.register_forward_pre_hook(
                lambda _, args, _name=name: called.setdefault(_name, []).extend(
                    a.shape for a in args if isinstance(a, Tensor)
                )
            )
    try:
        module(x, **call(module, x))
    except _ReachedError:
        return reached[0], called
    raise _DifferentError(f"'{rehearsal.row}' was not called")


def _without_weights(rehearsal: Rehearsal) -> nn.Module:
    """A copy in eval mode, which shares the weights; those on the meta device are random ones."""
    module = rehearsal.module
    intercepted = {
        id(parameter)
        for name in (*rehearsal.columns, rehearsal.row)
        for parameter in module.get_submodule(name).parameters()
    }
    memo: dict[int, Any] = {}
    numbers = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.device.type == "meta" and id(parameter) not in intercepted:
            values = torch.randn(parameter.shape, generator=numbers).to(parameter.dtype)
            memo[id(parameter)] = nn.Parameter(values)
        else:
            memo[id(parameter)] = parameter
    copied = copy.deepcopy(module, memo).eval()
    for inner in copied.modules():
        torch_modules.clear_forward_hooks(inner)
    return copied


def first_that_passes(
    rehearsal: Rehearsal, candidates: Sequence[tuple[Mapping[str, int], bool]]
) -> tuple[Mapping[str, int], bool, Passed] | str:
    """The first (attributes, reports_width) that passes, or why none does."""
    reason = "nothing was tried"
    for attributes, reports_width in candidates:
        result = rehearse(rehearsal, attributes, reports_width)
        if isinstance(result, Passed):
            return attributes, reports_width, result
        reason = result
    return reason
