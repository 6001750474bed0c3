"""Where the time of a step goes, which rank is slow, and what is sent."""

from __future__ import annotations

import math

import numpy as np

from lockstep.history.columns import PARTS
from lockstep.history.read import RunHistory
from lockstep.report.draw.charts import bars, stacked_chart
from lockstep.report.draw.html import columns, details, legend, paragraph, section, table
from lockstep.report.numbers import RunNumbers, StepTimes
from lockstep.words import bytes_text, digits, duration, percent

NAMES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "communication",
    "to_device": "copy to device",
    "data": "wait for data",
    "inference": "without gradients",
    "save": "save",
    "wait": "wait for ranks",
    "other": "other",
    "forward_backward": "forward and backward",
}
COLOURS = {part: place % 10 for place, part in enumerate(PARTS)}
"""The last has the first one's: with it there is no other of the two."""
MOST_BARS = 32


def step_time(run: RunHistory, numbers: RunNumbers) -> str:
    title = "Where a step's time goes"
    times = numbers.step_times
    if times is None:
        return section(title, paragraph("The time of steps is not known: no line of measures.jsonl has it."))
    if not times.shares:
        return section(
            title, paragraph(f"A step takes {duration(times.median)}; its parts were not measured.")
        )
    steps = run.steps
    rows = steps.kept & np.isfinite(steps.total)
    bands = [
        (NAMES[part], steps.parts[part][rows], colour)
        for part, colour in COLOURS.items()
        if part in times.shares
    ]
    chart = stacked_chart("Seconds of a step", steps.step[rows], bands, "seconds")
    return section(
        title,
        share_bar([("", times)]),
        _on_device(times),
        f'<div class="wide">{chart}</div>' if int(rows.sum()) > 1 else "",
        columns(_facts(numbers, times), ranks(numbers)),
    )


def _on_device(times: StepTimes) -> str:
    if not times.device_shares:
        return ""
    largest = sorted(times.device_shares.items(), key=lambda one: -one[1])
    shares = ", ".join(f"{NAMES[part]} {percent(share)}" for part, share in largest if share >= 0.001)
    return paragraph(f"On the device, which the host runs ahead of: {shares}.")


def share_bar(runs: list[tuple[str, StepTimes]]) -> str:
    """For each run (name, times) its parts as one bar of the length of its mean step, and what the colours mean."""
    rows = []
    for name, times in runs:
        pieces = [
            (f"{NAMES[part]}: {percent(times.shares[part])}", times.shares[part] * times.mean, colour)
            for part, colour in COLOURS.items()
            if part in times.shares
        ]
        rows.append((name or "a step", pieces, duration(times.mean)))
    there = {part for _, times in runs for part in times.shares}
    several = len(runs) > 1
    entries = [
        (f"f{colour}", NAMES[part] if several else f"{NAMES[part]} {percent(runs[0][1].shares[part])}")
        for part, colour in COLOURS.items()
        if part in there
    ]
    return bars(rows) + legend(entries)


def _facts(numbers: RunNumbers, times: StepTimes) -> str:
    rows = [
        ("median", duration(times.median)),
        ("mean", duration(times.mean)),
        ("one in ten is below", duration(times.low)),
        ("one in ten is above", duration(times.high)),
        ("one in a hundred is above", duration(times.worst)),
    ]
    if math.isfinite(times.hidden_share):
        rows.append(("communication that computing hides", percent(times.hidden_share)))
    for name, value in (
        ("FLOPs of the model, of the peak (MFU)", numbers.peak_share),
        ("with what is computed twice (HFU)", numbers.hardware_share),
    ):
        if math.isfinite(value):
            rows.append((name, percent(value)))
    if numbers.recomputation > 1.001:
        rows.append(("computed for each FLOP of the model", digits(numbers.recomputation)))
    return f"<div>{table(('a step', ''), rows, right=('',))}</div>"


def ranks(numbers: RunNumbers) -> str:
    """Bars of each rank's own time, the slowest first where there are many."""
    seconds = [(rank, one) for rank, one in enumerate(numbers.rank_seconds) if math.isfinite(one)]
    if len(seconds) < 2:
        return ""
    shown = seconds
    note = ""
    if len(seconds) > MOST_BARS:
        shown = sorted(seconds, key=lambda one: -one[1])[:MOST_BARS]
        note = paragraph(f"The {MOST_BARS} slowest of {len(seconds)} ranks.", "quiet")
    drawn = bars(
        [
            (
                f"rank {rank}",
                [(f"rank {rank}", one, 5 if rank in numbers.slow_ranks else 0)],
                f"{duration(one)}{' (slow)' if rank in numbers.slow_ranks else ''}",
            )
            for rank, one in shown
        ]
    )
    if not numbers.slow_ranks:
        least, most = (duration(one(value for _, value in seconds)) for one in (min, max))
        between = f"all take {most}" if least == most else f"they take {least} to {most}"
        summary = paragraph(f"No rank of {len(seconds)} is slow: {between} of their own for a step.")
        return f"<div>{summary}{details('each rank', note + drawn)}</div>"
    return f"<div><h3>Each rank's own work of a step, without waits</h3>{note}{drawn}</div>"


def communication(run: RunHistory, numbers: RunNumbers) -> str:
    title = "Communication"
    alone = numbers.world_sizes == [1]
    if not numbers.bytes_per_step:
        reason = "One rank alone sends nothing." if alone else "Bytes that were sent were not counted."
        return "" if alone else section(title, paragraph(reason))
    expected = numbers.bytes_expected
    sent = sum(numbers.bytes_per_step.values())
    count = len(run.steps)
    rows = [
        (
            axis,
            bytes_text(value),
            bytes_text(float(np.nansum(run.steps.bytes_sent[axis].filled_forward(count)[run.steps.kept]))),
        )
        for axis, value in numbers.bytes_per_step.items()
    ]
    by_axis = table(("axis", "a step", "in all steps"), rows, right=("a step", "in all steps"))
    if math.isfinite(expected) and expected > 0:
        text = (
            f"The formula for this way to train says {bytes_text(expected)} for a rank and a step; counted are "
            f"{bytes_text(sent)}, {digits(sent / expected, 3)} times that."
        )
        if sent > 1.1 * expected:
            text += " What is beyond it is sent by other calls: gathered metrics, buffers, the script's own."
    else:
        text = "There is no formula to compare with: of a split model, or where its size was not written."
    return section(title, paragraph("Bytes that rank 0 sends."), by_axis, paragraph(text))
