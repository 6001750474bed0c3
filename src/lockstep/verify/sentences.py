"""What a comparison found, or what a forward raised, in sentences."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping

from torch import nn

from lockstep.verify.compare import STATE, Comparison, Difference

REMEDIES: Mapping[str, str] = {
    "tp": "Keep this module whole: parallel={..., 'tp_plan': {'MODULE': 'replicate'}} (docs: tensor parallel)",
    "cp": "Name with blocks=... only blocks that do not mix positions, or mix positions before or after the blocks",
    "chunks": (
        "Inside maybe_context_parallel, pass every tensor that has positions in buffers. If the loss leaves out "
        "some labels, pass num_items_in_batch: the number of labels of the whole sequence, divided by cp"
    ),
    "pp": (
        "If the loss is a sum over the batch, say loss=sum; if it is neither a mean nor a sum, loss=whole. If an "
        "argument must not be cut, say batch_dims=NAME=none; if the batch is another dimension of it, batch_dims=NAME=1"
    ),
    "ep": "Spread only layers of lockstep.nn.MixtureOfExperts, and keep all other layers the same on all ranks",
}
RUN_REMEDIES: Mapping[str, str] = {
    "tp": REMEDIES["tp"],
    "cp": REMEDIES["cp"],
    "pp": (
        "Pass what blocks share as arguments and results of the blocks, or name with split=NAME the blocks at which "
        "stages begin"
    ),
    "ep": REMEDIES["ep"],
}
_OF_MIXED = (
    "it computes with weights from parameters(), which are DTensors, and with plain tensors together. Read the "
    "weights as p.full_tensor(), or add a penalty on weights to the loss in the training loop"
)
EXPLAINED: Mapping[str, str] = {
    "got mixed torch.Tensor and DTensor": _OF_MIXED,
    "'Tensor' object has no attribute 'placements'": _OF_MIXED,
    "In order to use an autograd.Function with functorch transforms": (
        "inside torch.func (vmap, grad, ...) it calls layers that are split over ranks, and torch.func cannot "
        "see their communication. Use one more dimension instead of vmap"
    ),
    "differentiate twice": "it differentiates twice through layers that are split over ranks, which is not possible",
    "is a view and its base or another view of its base has been modified inplace": (
        "it changes a weight in place, but the weight is a part of a DTensor (an embedding with max_norm does "
        "so too). Change weights in the training loop"
    ),
}
"""Piece of what torch says -> what it means here."""
IN_A_BLOCK = (
    "A pipeline gives a module only some rows of the batch at a time, so the module must compute each row "
    "without the others. If the rows of an argument are in another dimension, name it with batch_dims=NAME=1. "
    "Compute what needs several rows in the loss, or in the training loop"
)
STATE_REMEDY = (
    "A split forward may run several times in a step, on parts of the batch. Change this state once a step, in "
    "the training loop"
)


def verified(model: str, parallel: object, when: str, comparison: Comparison) -> str:
    """Return the line for a split that is right."""
    what = "loss" if comparison.has_loss else "outputs"
    return (
        f"{model} with parallel='{parallel}' was verified {when}: {what} and {comparison.gradients} "
        "gradients are those of the whole model."
    )


def not_verified(model: str, parallel: object, reason: str) -> str:
    """Return the line where nothing can be compared."""
    return (
        f"{model} with parallel='{parallel}' could not be verified on the first batch: {reason} To turn this "
        "message off, pass verify='off'."
    )


def different(model: str, parallel: object, when: str, axes: list[str], comparison: Comparison) -> str:
    """Why the run stops."""
    first = comparison.differences[0]
    where = ""
    if comparison.module is not None:
        named = f"module '{comparison.module}'" if comparison.module else f"{model}'s own forward"
        where = f" It begins in {named}."
    remedies = STATE_REMEDY if first.kind in STATE else "; or ".join(REMEDIES[axis] for axis in axes)
    if axes == ["pp"] and comparison.module and first.kind not in STATE:
        remedies = IN_A_BLOCK
    return (
        f"{model} with parallel='{parallel}' does not compute what the whole model does: {when} "
        f"{_difference_text(first)}{_other_differences(comparison)}.{where} {_named(remedies, comparison.module)}. "
        "To train anyway, pass verify='off'."
    )


def cannot_run(
    model: str, parallel: object, axes: list[str], error: BaseException, module: str | None
) -> str:
    """Why the run stops where the whole model takes a batch and the split one raises, in the forward of ``module``."""
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    text = next((explanation for piece, explanation in EXPLAINED.items() if piece in text), text)
    where = f" in {module}" if module else ""
    remedy = _named(RUN_REMEDIES[axes[0]], module.partition("'")[2].rstrip("'") if module else None)
    return (
        f"{model} runs on the first batch, but with parallel='{parallel}' it raises {type(error).__name__}{where}"
        f"{': ' if text else ''}{text[:300]}. {remedy}."
    )


def _named(remedy: str, module: str | None) -> str:
    """Replace MODULE by the pattern of a module and those like it."""
    parts = (module or "MODULE").split(".")
    return remedy.replace("MODULE", ".".join("*" if part.isdigit() else part for part in parts))


def _difference_text(difference: Difference) -> str:
    name, found, expected = difference.name, difference.found, difference.expected
    if difference.kind == "loss":
        return f"the loss is {_shown(found)} instead of {_shown(expected)}{_ratio(found, expected)}"
    if difference.kind == "output":
        return f"output{name} {_differs(found, expected, difference.relative)}"
    if difference.kind == "gradient":
        if isinstance(found, float) and math.isfinite(difference.relative):
            return (
                f"the gradient of '{name}' is off by {_percent(difference.relative)} (its norm is {_shown(found)} "
                f"instead of {_shown(expected)})"
            )
        return f"the gradient of '{name}' {_differs(found, expected, difference.relative)}"
    if difference.kind == "replica":
        return f"the gradient of '{name}', of which ranks hold copies, differs between ranks"
    if difference.kind == "buffer":
        change = "" if found is None else f" ({_shown(found)} instead of {_shown(expected)})"
        return f"the buffer '{name}' changes differently{change}"
    return f"the attribute '{name}' becomes {_shown(found)} instead of {_shown(expected)}"


def _other_differences(comparison: Comparison) -> str:
    wrong = {d.name for d in comparison.differences if d.kind in ("gradient", "replica")}
    first = comparison.differences[0]
    rest = wrong - {first.name}
    if first.kind in ("gradient", "replica"):
        return f", and so are {len(rest)} of the other {comparison.gradients - 1} gradients" if rest else ""
    named = f", '{next(iter(sorted(wrong)))}' among them" if wrong else ""
    return f", and {len(wrong)} of {comparison.gradients} gradients are wrong{named}" if wrong else ""


def _differs(found: object, expected: object, relative: float) -> str:
    if isinstance(expected, tuple):
        return f"has shape {found} instead of {expected}"
    return f"is off by {_percent(relative)}"


def _ratio(found: float, expected: float) -> str:
    if not expected or not math.isfinite(found / expected):
        return ""
    for number in range(2, 65):
        for ratio, text in ((1 / number, f"1/{number} of it"), (float(number), f"{number} times as much")):
            if math.isclose(found / expected, ratio, rel_tol=1e-3):
                return f" ({text})"
    return ""


def _percent(relative: float) -> str:
    return "more than its size" if not math.isfinite(relative) else f"{100 * relative:.3g}%"


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value}"


def causes_of(error: BaseException) -> list[BaseException]:
    """Return the error, and what it came of, step by step."""
    found = [error]
    while found[-1].__cause__ is not None:
        found.append(found[-1].__cause__)
    return found


def module_of(error: BaseException, model: nn.Module) -> str | None:
    """Return the innermost module whose method raised, as a text; of one that only other ranks hold, its class."""
    names = {id(module): f"module '{name}'" for name, module in model.named_modules() if name}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("lockstep."):
            found = names.get(id(owner), f"a {type(owner).__name__}")
    return found


def line_of(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
