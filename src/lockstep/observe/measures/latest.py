"""What a line of progress shows of a run: its newest numbers, and how many steps are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.observe.measures.step import StepMeasures
from lockstep.runtime.step import LoaderProgress

STEPS = 16
"""Over which rates are taken: this is asked for twice a second."""


def latest_numbers(
    recent: Sequence[StepMeasures],
    peak_flops: float | None,
    total_steps: int | None,
    progress: LoaderProgress | None,
    window_length: int,
) -> dict[str, float]:
    """Return what is known of ``step``, ``loss``, ``epoch``, ``step_seconds``, ``samples_per_second``,
    ``tokens_per_second``, ``model_flops_per_second``, ``mfu`` (0 to 1), ``total_steps``, ``epoch_steps_left``.

    Args:
        recent: The latest steps, oldest first.
        peak_flops: Of all devices in a second; None: not known.
        total_steps: What the script has said.
        progress: Of the loader that is trained on; another thread may write it meanwhile.
        window_length: Micro-batches of a step.
    """
    if not recent:
        return {}
    recent = recent[-STEPS:]
    latest = recent[-1]
    found: dict[str, float | None] = {
        "step": latest.step,
        "loss": latest.loss,
        "epoch": latest.epoch,
        "step_seconds": sum((one.seconds or {}).get("total", 0.0) for one in recent) / len(recent),
        "samples_per_second": rate_of(recent, lambda one: one.samples),
        "tokens_per_second": rate_of(recent, lambda one: one.tokens),
        "model_flops_per_second": rate_of(recent, lambda one: (one.flops or {}).get("model")),
        "total_steps": total_steps,
        "epoch_steps_left": _steps_left(progress, window_length),
    }
    rate = found["model_flops_per_second"]
    found["mfu"] = None if rate is None or not peak_flops else rate / peak_flops
    return {name: value for name, value in found.items() if value is not None}


def rate_of(steps: Sequence[StepMeasures], amount: Callable[[StepMeasures], float | None]) -> float | None:
    """Return what comes in a second, over the steps of which the amount and the time are known."""
    pairs = [
        (value, one.seconds["total"])
        for one in steps
        if one.seconds is not None and (value := amount(one)) is not None
    ]
    seconds = sum(total for _, total in pairs)
    return sum(value for value, _ in pairs) / seconds if seconds else None


def _steps_left(progress: LoaderProgress | None, window_length: int) -> int | None:
    """Return the steps that are left of this epoch; None: the loader has no length, or its epoch is over."""
    loader = None if progress is None else progress.loader
    if progress is None or loader is None:
        return None
    try:
        batches = len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
    return -(-max(batches - progress.batches, 0) // window_length)
