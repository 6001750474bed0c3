"""The lines to write for the cheapest way that fits."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.plan.estimate import InferenceRow, Limits, TrainingRow, cheapest

NOTHING = "nothing fits"


def suggestions(
    limits: Limits, inference: Sequence[InferenceRow], training: Sequence[TrainingRow]
) -> dict[str, str]:
    """What to write, by what it is for; empty where no limit says what fits."""
    if limits.hold(0, 0, 0) is None:
        return {}
    found: dict[str, str] = {}
    for dtype in dict.fromkeys(row.dtype for row in inference):
        fitting = [row for row in inference if row.dtype == dtype and row.fits]
        chosen = min(fitting, key=lambda row: row.moved, default=None)
        found[f"run in {dtype}"] = NOTHING if chosen is None else _call(chosen, limits)
    for ranks in dict.fromkeys(row.ranks for row in training):
        for precision in dict.fromkeys(row.precision for row in training):
            rows = [row for row in training if (row.ranks, row.precision) == (ranks, precision)]
            best = cheapest(rows)
            what = f"train on {several(ranks)} in {'fp32' if precision == 'no' else precision}"
            more = "" if precision == "no" else f', mixed_precision="{precision}"'
            found[what] = NOTHING if best is None else f'Accelerator(parallel="{best.parallel}"{more})'
    return found


def _call(row: InferenceRow, limits: Limits) -> str:
    """How to run a model this way."""
    if row.placement == "whole":
        return "model.to(device)" if not limits.on_cpu else "the model as it is"
    if limits.on_cpu:
        return 'disk_offload(model, "FOLDER", execution_device="cpu")'
    given = {"0": limits.device, '"cpu"': limits.host}
    memory = ", ".join(f"{place}: {_exact(size)}" for place, size in given.items() if size is not None)
    folder = ', offload_folder="FOLDER"' if row.placement == "from disk" else ""
    return (
        f'load_checkpoint_and_dispatch(model, CHECKPOINT, device_map="auto", max_memory={{{memory}}}{folder})'
    )


def _exact(size: int) -> str:
    """A size as ``max_memory`` takes it: in the largest unit that loses nothing."""
    for exponent, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        for base, unit in ((1000, "B"), (1024, "iB")):
            if size and size % base**exponent == 0:
                return f'"{size // base**exponent}{letter}{unit}"'
    return str(size)


def several(ranks: int) -> str:
    """So many processes, in words."""
    return "1 process" if ranks == 1 else f"{ranks} processes"
