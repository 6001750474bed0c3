"""Whether a module may be split: it is run on random numbers, forward and backward, whole and as each rank would.

Between its column layers and its row layers a module must treat the ranks' features apart from each other: an
elementwise function, or attention by heads. What it does cannot be read from its shapes. So the outputs of
its column layers are replaced by random ones, and what reaches the row layers is compared: the part of the
whole run that belongs to a rank must be what a run with that rank's share gives, and so must its gradient. Whole
tensors that meet a rank's features (see ``RankFeatures``) must have the gradient of the whole run, once those of the
ranks are summed where they meet. No weights of the layers are used, and nothing is sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lockstep.parallel.tensor.rehearsal_run import (
    Example,
    GradientsDifferError,
    RehearsalRun,
    TensorRehearsal,
    example_of,
    forward_of_part,
    meetings,
)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Passed:
    """``partial``: names of modules inside that work on parts, so that gradients of theirs are partial sums.

    ``meets``: whole tensors of other kinds meet the parts. ``arguments``: of the module, whose value may have something
    of each head: name -> the numbers of dimensions that it may have then; heads are the third from the end.
    """

    partial: tuple[str, ...] = ()
    meets: bool = False
    arguments: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Different(str):
    """Why it may not be split, seen as it ran; any other text tells why it could not be run."""


def run_rehearsal(rehearsal: TensorRehearsal) -> Passed | str:
    """Passed, or why not."""
    reason = ""
    for call in _CALLS:
        try:
            return _compare(rehearsal, call)
        except (_DifferentError, GradientsDifferError) as error:
            return Different(error)
        except Exception as error:
            # A user's forward may raise anything.
            reason = reason or f"running it raised {_one_line(error)}"
    return reason


def first_that_passes(
    rehearsal: TensorRehearsal, candidates: Sequence[tuple[Mapping[str, int], bool]]
) -> tuple[Mapping[str, int], bool, Passed] | str:
    """The first (attributes, reports_width) that passes, or why none does."""
    reason = "nothing was tried"
    for attributes, reports_width in candidates:
        result = run_rehearsal(replace(rehearsal, attributes=attributes, reports_width=reports_width))
        if isinstance(result, Passed):
            return attributes, reports_width, result
        reason = result
    return reason


# -- how a module is called --------------------------------------------------------------------------------


def _alone(module: nn.Module, x: Tensor) -> dict[str, object]:
    return {}


def _with_rotary(module: nn.Module, x: Tensor) -> dict[str, object]:
    """For attention of transformers: cosine and sine of each position, here of no rotation."""
    names = ("qk_rope_head_dim", "head_dim")
    widths = (getattr(m, name, None) for m in module.modules() for name in names)
    width = next((width for width in widths if isinstance(width, int)), None)
    if width is None:
        raise TypeError("no head_dim")
    ones = x.new_ones(1, x.shape[1], width)
    return {"position_embeddings": (ones, torch.zeros_like(ones)), "attention_mask": None}


def _with_masks_absent(module: nn.Module, x: Tensor) -> dict[str, object]:
    """For what wants more than one tensor, as attention of queries, keys and values does."""
    return {name: None if "mask" in name or "bias" in name else x for name in _required(module)}


def _with_others_absent(module: nn.Module, x: Tensor) -> dict[str, object]:
    return dict.fromkeys(_required(module))


def _required(module: nn.Module) -> list[str]:
    """Names of arguments after the first that must be given."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]


_CallForm = Callable[[nn.Module, Tensor], dict[str, object]]
_CALLS: tuple[_CallForm, ...] = (_alone, _with_rotary, _with_masks_absent, _with_others_absent)


class _DifferentError(Exception):
    """The ranks' parts are not those of the whole."""


# -- whole and parts ---------------------------------------------------------------------------------------


def _compare(rehearsal: TensorRehearsal, call: _CallForm) -> Passed:
    # The whole run first: each rank's run must reproduce its own part of it.
    example = example_of(rehearsal, call)
    whole = forward_of_part(rehearsal, example)
    if not whole.given:
        raise _DifferentError(f"'{rehearsal.rows[0]}' was not called")
    parts = _ranks(rehearsal, call, whole)
    partial, meets = meetings(whole, parts)
    # A module may take another path in training, such as fused attention. Gradients must be right on both.
    trained = _in_training(rehearsal, example)
    if trained is not None:
        also, meets_then = meetings(trained, _ranks(rehearsal, call, trained))
        # Modules that work on parts on one of the paths only: then only sums where tensors meet are right on both.
        meets = meets or meets_then or set(also) != set(partial)
        partial = () if meets else partial
    names = _may_be_none(rehearsal.module) if rehearsal.heads > 1 else ()
    shapes = {name: _of_heads(rehearsal, call, name, whole) for name in names}
    return Passed(partial, meets, {name: dims for name, dims in shapes.items() if dims})


def _in_training(rehearsal: TensorRehearsal, example: Example) -> RehearsalRun | None:
    """The whole run in training mode, where that is the same each time."""
    example = replace(example, trains=True)
    try:
        first, again = forward_of_part(rehearsal, example), forward_of_part(rehearsal, example)
    except Exception:
        # A user's forward may raise anything.
        return None
    is_same = len(first.given) == len(again.given) and all(map(torch.equal, first.given, again.given))
    return first if is_same and first.given else None


def _ranks(rehearsal: TensorRehearsal, call: _CallForm, whole: RehearsalRun) -> list[RehearsalRun]:
    """Each rank's run, with the values of its part of the whole one."""
    ranks = rehearsal.ranks
    parts = []
    for rank in range(ranks):
        example = example_of(rehearsal, call, rank, whole.argument, whole.trains)
        try:
            part = forward_of_part(rehearsal, example)
        except Exception as error:
            # A user's forward may raise anything when it gets a part.
            raise _DifferentError(
                f"with a rank's part of its features it raises {_one_line(error)}"
            ) from error
        _check_values(whole, part, rank, ranks)
        parts.append(part)
    return parts


def _check_values(whole: RehearsalRun, part: RehearsalRun, rank: int, ranks: int) -> None:
    if len(part.given) != len(whole.given):
        raise _DifferentError("its layers are called in another way with a rank's part of the features")
    # What a row layer is given [..., features / N] must be this rank's features of the whole [..., features].
    for expected, got in zip(whole.given, part.given, strict=True):
        own = expected.chunk(ranks, dim=-1)[rank]
        if got.shape != own.shape or not _close(got, own):
            raise _DifferentError("its features depend on each other, as running it shows")
    # A mark that reaches the output was summed by no row layer: ranks would go on with different values.
    if part.is_marked:
        raise _DifferentError("it returns something that is computed from a rank's features alone")
    if part.stopped != whole.stopped:
        raise _DifferentError("what follows its row layers differs with a rank's part of the features")
    if whole.output is None or part.output is None:
        return
    if part.output.shape != whole.output.shape or not _close(part.output, whole.output):
        raise _DifferentError("what it returns depends on which features a rank has")


def _close(got: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE.get(got.dtype, 2e-2)
    return torch.allclose(got, expected.to(got.dtype), tolerance, tolerance)


# -- arguments that have something of each head -------------------------------------------------------------


def _may_be_none(module: nn.Module) -> list[str]:
    parameters = inspect.signature(type(module).forward).parameters.values()
    optional = [p.name for p in parameters if p.default is None and p.kind is not p.VAR_KEYWORD]
    return [*_required(module), *optional]


def _of_heads(
    rehearsal: TensorRehearsal, call: _CallForm, name: str, without: RehearsalRun
) -> tuple[int, ...]:
    """How many dimensions a bias of each head may have that is given as this argument, and can be split by heads."""
    found = []
    # [batch, heads, queries, keys], or without the batch.
    for dims in (4, 3):
        given = (name, dims)
        try:
            whole = forward_of_part(rehearsal, example_of(rehearsal, call, argument=given))
        except Exception:
            # It takes no such argument.
            continue
        # The module ignores the argument, or takes another path with it: this rehearsal says nothing of it.
        if len(whole.given) != len(without.given) or all(map(torch.equal, whole.given, without.given)):
            continue
        try:
            meetings(whole, _ranks(rehearsal, call, whole))
        except (_DifferentError, GradientsDifferError):
            continue
        found.append(dims)
    return tuple(found)


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return type(error).__name__ + (f" ({text[0][:60]})" if text else "")
