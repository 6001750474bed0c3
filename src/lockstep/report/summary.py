"""A run in sentences: what it did, why it was slow, why it stopped."""

from __future__ import annotations

import math

from lockstep.history.attempts import RunStatus
from lockstep.history.events import named
from lockstep.history.goodput import LOST
from lockstep.report.numbers import RunNumbers, StepTimes
from lockstep.words import bytes_text, count, date, digits, duration, listed, percent, short, whole

COMPUTE = ("forward", "backward")
WORTH_SAYING = 0.05
"""The least share of a step's time that is called the reason why it is slow."""
SLOWER = 1.1
REASONS = {
    "data": (
        "spent waiting for data",
        "Read ahead with more workers (num_workers), or prepare samples beforehand.",
    ),
    "to_device": (
        "spent copying batches to the device",
        "Use workers (num_workers) and pin_memory=True in the loader, so that a thread pins the batches.",
    ),
    "communication": (
        "spent waiting for communication with other ranks",
        "Accumulate gradients over more micro-batches, or average them in bf16.",
    ),
    "optimizer": ("spent in the optimizer", "Try the fused form of the optimizer (fused=True)."),
    "inference": (
        "spent in calls of models without gradients",
        "Evaluate less often, on fewer samples, or with larger batches.",
    ),
    "save": ("spent saving", "Save in the background (save_state(blocking=False)), or less often."),
    "wait": (
        "spent waiting for other ranks",
        "Look for a rank that is slow or has more work than the others.",
    ),
    "other": (
        "spent in your own code between the calls of Lockstep",
        "Look for logging, evaluation, .item() and sleep in each step.",
    ),
}
"""Part of a step -> its name in a sentence, and what to do."""
ENDS = {"exit": "the process came to its end", "end_training": "the script called end_training"}
"""Reasons that are words of the program."""


def chapters(numbers: RunNumbers) -> list[tuple[str, list[str]]]:
    """Return (title, sentences), each a whole statement; those that cannot be made are left out."""
    return [
        ("What it did", [what_it_did(numbers), *how_it_learnt(numbers)]),
        ("How fast", why_it_was_slow(numbers)),
        ("How it ended" if numbers.status is not RunStatus.RUNNING else "Now", [why_it_stopped(numbers)]),
    ]


def sentences(numbers: RunNumbers) -> list[str]:
    """Return all of them, in that order."""
    return [sentence for _, chapter in chapters(numbers) for sentence in chapter]


def what_it_did(numbers: RunNumbers) -> str:
    if not numbers.steps:
        return "No optimizer step was written."
    sentence = f"{count(numbers.steps, 'optimizer step')}"
    seen = [f"{short(numbers.samples)} samples"] if numbers.samples else []
    if numbers.tokens:
        seen.append(f"{'at least ' if numbers.tokens_missing else ''}{short(numbers.tokens)} tokens")
    if seen:
        sentence += f", {listed(seen)}"
    if numbers.goodput is not None:
        sentence += f" in {duration(numbers.goodput.total)}"
    if ranks := numbers.world_sizes:
        shown = [str(size) for size in ranks]
        shown = shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]]
        sentence += f" on {count(ranks[0], 'rank') if len(ranks) == 1 else ', then '.join(shown) + ' ranks'}"
    if math.isfinite(numbers.epoch):
        sentence += f"; it ended in epoch {whole(numbers.epoch)} (the first is epoch 0)"
    return f"{sentence}."


def how_it_learnt(numbers: RunNumbers) -> list[str]:
    found, loss = [], numbers.loss
    if loss is not None and math.isfinite(loss.first):
        found.append(
            f"The loss went from {digits(loss.first, 4)} to {digits(loss.last, 4)}; the lowest was "
            f"{digits(loss.least, 4)} at step {whole(loss.least_step)}."
        )
    for name, curve in (("loss", loss), ("gradient norm", numbers.gradient_norm)):
        if curve is not None and curve.not_finite:
            found.append(
                f"The {name} was no finite number in {count(curve.not_finite, 'step')}, first in step "
                f"{whole(curve.first_not_finite)}."
            )
    if numbers.spikes:
        skipped = f"; {count(numbers.skipped, 'batch', 'batches')} skipped" if numbers.skipped else ""
        found.append(f"{count(len(numbers.spikes), 'spike')} of loss or gradient norm{skipped}.")
    for event in numbers.damage[-3:]:
        found.append(f"Damage: {event.sentence.rstrip('.')}.")
    return found


def why_it_was_slow(numbers: RunNumbers) -> list[str]:
    times = numbers.step_times
    found = [] if times is None else [_speed(numbers, times), _largest_part(times), _uneven(times)]
    found += [_slow_ranks(numbers), _lost(numbers)]
    if numbers.peak_share > 1 or numbers.hardware_share > 1:
        found.append(
            f"The FLOPs come to {percent(max(numbers.peak_share, numbers.hardware_share))} of the devices' peak, which "
            "cannot be: the peak or the count is wrong."
        )
    return [sentence for sentence in found if sentence]


def _speed(numbers: RunNumbers, times: StepTimes) -> str:
    sentence = f"A step takes {duration(times.median)}"
    rates = [
        f"{short(rate)} {name}/s"
        for name, rate in (("samples", numbers.samples_per_second), ("tokens", numbers.tokens_per_second))
        if math.isfinite(rate)
    ]
    if rates:
        sentence += f": {listed(rates)}"
    if 0 < numbers.peak_share <= 1:
        sentence += f", {percent(numbers.peak_share)} of the devices' peak (MFU)"
    computing = sum(times.shares.get(part, 0.0) for part in COMPUTE)
    if computing:
        sentence += f". Forward and backward are {percent(computing)} of it"
    return f"{sentence}."


def _largest_part(times: StepTimes) -> str:
    others = {part: share for part, share in times.shares.items() if part in REASONS}
    if not others:
        return ""
    part = max(others, key=lambda name: others[name])
    what, advice = REASONS[part]
    if others[part] < WORTH_SAYING:
        return f"Next: only {percent(others[part])} is {what}, so there is little to gain."
    return f"Next: {percent(others[part])} is {what}. {advice}"


def _uneven(times: StepTimes) -> str:
    if times.late > SLOWER * times.early:
        return (
            f"Steps became slower: {duration(times.early)} in the first fifth of them, {duration(times.late)} in the "
            "last."
        )
    if times.count >= 100 and times.worst > 2 * times.median:
        return (
            f"Steps are uneven: one in a hundred takes {duration(times.worst)} or longer, "
            f"{digits(times.worst / times.median, 2)} times the usual."
        )
    return ""


def _slow_ranks(numbers: RunNumbers) -> str:
    slow = sorted(numbers.slow_ranks.items(), key=lambda one: -one[1])
    if not slow:
        return ""
    shown = [f"rank {rank} ({digits(factor, 2)} times the usual)" for rank, factor in slow[:3]]
    if len(slow) > 3:
        shown.append(f"{len(slow) - 3} more")
    return f"The others wait for {listed(shown)}."


def _lost(numbers: RunNumbers) -> str:
    wall = numbers.goodput
    if wall is None or not math.isfinite(wall.share):
        return ""
    worst = sorted(wall.lost.items(), key=lambda one: -one[1])[:3]
    worst = [(name, seconds) for name, seconds in worst if seconds > 0.005 * wall.total]
    sentence = f"{percent(wall.share)} of the time on the clock went into steps that count (goodput)"
    if worst:
        sentence += (
            f"; the rest went to {listed([f'{LOST[name]} ({duration(seconds)})' for name, seconds in worst])}"
        )
    again = f" {count(numbers.again, 'step')} were done twice." if numbers.again else ""
    return f"{sentence}.{again}"


def why_it_stopped(numbers: RunNumbers) -> str:
    """Say in one sentence why the run stopped; it is always there."""
    event, sentence = numbers.ended_by, ""
    reason = event.sentence.rstrip(".") if event is not None else ""
    reason = ENDS.get(reason, reason)
    at = f" after step {whole(numbers.last_step)}" if math.isfinite(numbers.last_step) else ""
    if numbers.status is RunStatus.FINISHED:
        sentence = f"It ended{at}{f': {reason}' if reason else ''}."
    elif numbers.status is RunStatus.STOPPED:
        sentence = f"It was stopped{at}{f': {reason}' if reason else ''}."
    elif numbers.status is RunStatus.FAILED and event is not None:
        rank = event.number("rank")
        who = f"Rank {whole(rank)}" if math.isfinite(rank) else "The run"
        what = "found damage" if event.name == "damage" else "failed"
        sentence = f"{who} {what}{at}{f': {reason}' if reason else ''}.{_hung_before(numbers)}"
    elif numbers.status is RunStatus.HUNG:
        sentence = f"It stood still{at}, and was ended{f': {reason}' if reason else ''}."
    elif numbers.status is RunStatus.HANGS:
        sentence = f"It stands still{at}{f': {reason}' if reason else ''}."
    elif numbers.status is RunStatus.RUNNING:
        left, total = numbers.seconds_left, whole(numbers.total_steps)
        to_do = f" of {total}, with {duration(left)} left" if math.isfinite(left) else ""
        sentence = (
            f"It runs; the last step was {whole(numbers.last_step)}{to_do}, on {date(numbers.last_time)}."
        )
    elif numbers.status is RunStatus.SILENT:
        sentence = (
            f"It ended without a word{at}: the last sign of it is of {date(numbers.last_time)}. The process was killed"
            ", or its machine is gone."
        )
    else:
        sentence = "It has not made a step yet."
    return sentence


def _hung_before(numbers: RunNumbers) -> str:
    """Return what the watch said of the last start, where an error may only follow from it."""
    hangs = named(numbers.attempts[-1].events, "hang") if numbers.attempts else []
    return f" Before that it stood still: {hangs[-1].sentence.rstrip('.')}." if hangs else ""


def headline(numbers: RunNumbers) -> list[tuple[str, str]]:
    """Return (name, value) of the few numbers that people ask for first."""
    times, wall = numbers.step_times, numbers.goodput
    rows = [
        ("steps", whole(numbers.steps) if numbers.steps else ""),
        ("loss", digits(numbers.loss.last, 4) if numbers.loss else ""),
        ("a step", duration(times.median) if times else ""),
        ("tokens/s", short(numbers.tokens_per_second) if math.isfinite(numbers.tokens_per_second) else ""),
        (
            "samples/s",
            short(numbers.samples_per_second)
            if math.isfinite(numbers.samples_per_second) and not math.isfinite(numbers.tokens_per_second)
            else "",
        ),
        ("MFU", percent(numbers.peak_share) if math.isfinite(numbers.peak_share) else ""),
        ("goodput", percent(wall.share) if wall and math.isfinite(wall.share) else ""),
        ("on the clock", duration(wall.total) if wall else ""),
        ("peak memory", bytes_text(numbers.peak_memory) if math.isfinite(numbers.peak_memory) else ""),
    ]
    return [(name, value) for name, value in rows if value]
