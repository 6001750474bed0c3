"""The text of ``lockstep estimate``: tables, what they count, and what to write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from lockstep.cli.output import print_table
from lockstep.plan.estimate import (
    NOTHING,
    InferenceRow,
    Limits,
    TrainingRow,
    least_memory,
    several,
    suggestions,
)
from lockstep.plan.estimate_model import ModelFacts
from lockstep.plan.traffic import AveragingTime
from lockstep.words import escaped_lines, memory_text

INFERENCE_NOTE = (
    "Counted: parameters and buffers, in a forward. A streamed model needs room for 4 of its largest block on the "
    "device, and the more it gets, the less it moves. Not counted: activations, caches of generation, what the "
    "allocator keeps."
)
TRAINING_NOTE = (
    "Counted for one rank, at most within a step: float32 weights, gradients, {optimizer}'s state, DDP's buckets, what "
    "is gathered or streamed, buffers{with_activations}. moved: in a step of one micro-batch, to other ranks, to the "
    "host and back, and to the disk and back. FOLDER: a folder on a fast disk. Not counted: {without_activations}"
    "temporaries of the optimizer, fragmentation, what the allocator and the communication backend keep."
)
ACTIVATION_NOTE = (
    "activations: what autograd keeps of a forward with the model's own loss, for {batch} rows of {sequence} tokens on "
    "a rank, counted without computing it; in 16 bits with autocast's copies of the weights, which ZeRO has not. With "
    "activation=full and offload one block's are made again at a time."
)

AVERAGING_NOTE = (
    "ring: all ranks send at once, 2 (N - 1) / N of the gradients each. parameter server: the link of one process "
    "carries the gradients of all N ranks to it, and N means back. Not counted: latency, adding up, and what a "
    "backward hides."
)


def print_estimate(
    facts: ModelFacts,
    limits: Limits,
    inference: Sequence[InferenceRow],
    training: Sequence[TrainingRow],
    optimizer: str,
) -> None:
    name, largest = facts.largest()
    trained = "" if facts.trainable == facts.count else f", {facts.trainable:,} of them trained"
    _print_escaped(
        f"{facts.name} ({facts.kind}): {facts.count:,} parameters{trained}, {memory_text(facts.nbytes())}"
    )
    _print_escaped(
        f"stored as {', '.join(facts.stored)}; {facts.blocks} blocks; largest part: {name}, {memory_text(largest)}"
    )
    for note in facts.notes:
        _print_escaped(note)
    _print_inference(inference, limits)
    for ranks in dict.fromkeys(row.ranks for row in training):
        _print_training([row for row in training if row.ranks == ranks], limits)
    _print_activations(facts, {row.precision for row in training})
    batch = next(iter((facts.activations or {}).values()), None)
    _print_escaped("")
    _print_escaped(
        TRAINING_NOTE.format(
            optimizer=optimizer,
            with_activations=", and activations" if batch else "",
            without_activations="" if batch else "activations (give --batch and --sequence), ",
        )
    )
    _print_suggestions(limits, inference, training)


def print_averaging(rows: Sequence[AveragingTime], bandwidth: str | None) -> None:
    """Print the time by the two kinds of communication that average gradients."""
    if not rows:
        return
    _print_escaped(
        f"\nTo average {memory_text(rows[0].nbytes)} of gradients, at {bandwidth} a second of each link"
    )
    cells = [[str(row.ranks), _seconds(row.ring), _seconds(row.parameter_server)] for row in rows]
    print_table(["ranks", "ring", "parameter server"], cells, right=["ranks", "ring", "parameter server"])
    _print_escaped(AVERAGING_NOTE)


def _seconds(value: float) -> str:
    return f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _print_inference(rows: Sequence[InferenceRow], limits: Limits) -> None:
    _print_escaped("\nTo run it")
    titles = ["dtype", "weights", "device", "host", "disk", "moved a forward"]
    cells = [
        [
            row.dtype,
            row.placement,
            *map(memory_text, (row.device, row.host, row.disk, row.moved)),
            _yes(row.fits),
        ]
        for row in rows
    ]
    _table(titles, cells, fits=limits.hold(0, 0, 0) is not None, right=titles[2:])
    _print_escaped(INFERENCE_NOTE)


def _print_training(rows: Sequence[TrainingRow], limits: Limits) -> None:
    precisions = list(dict.fromkeys(row.precision for row in rows))
    by_way: dict[str, dict[str, list[TrainingRow]]] = {}
    for row in rows:
        by_way.setdefault(row.way, {}).setdefault(row.precision, []).append(row)
    _print_escaped(f"\nTo train it on {several(rows[0].ranks)}")
    names = [""] if len(precisions) == 1 else [f" {_precision_name(one)}" for one in precisions]
    titles = [
        "parallel",
        *(f"device{name}" for name in names),
        "host",
        "disk",
        *(f"moved{name}" for name in names),
    ]
    cells = []
    for way, ways in by_way.items():
        first = ways[precisions[0]][0]
        if first.reason:
            cells.append([way, *["-"] * (len(titles) - 1), first.reason])
            continue
        devices = [memory_text(ways[one][0].device) for one in precisions]
        moved = [memory_text(ways[one][0].moved) for one in precisions]
        found = {_precision_name(one): _fitting(ways[one]) for one in precisions}
        same = len(set(found.values())) == 1
        fits = _fitting(ways[precisions[0]]) if same else ", ".join(map(": ".join, found.items()))
        cells.append([way, *devices, memory_text(first.host), memory_text(first.disk), *moved, fits])
    _table(titles, cells, fits=limits.hold(0, 0, 0) is not None, right=titles[1:])


def _fitting(rows: Sequence[TrainingRow]) -> str:
    """Return whether a way fits, or with which ``activation``."""
    fitting = next((row for row in rows if row.fits), None)
    if fitting is None:
        return "no"
    word = fitting.parallel.partition("activation=")[2].partition(" ")[0]
    return f"with activation={word}" if word else "yes"


def _print_activations(facts: ModelFacts, precisions: set[str]) -> None:
    if not facts.activations:
        return
    _print_escaped("\nActivations on a rank")
    titles = ["precision", "activation=none", "full", "offload"]
    rows = [
        [_precision_name(precision), *map(memory_text, (one.none, one.full, one.offload))]
        for precision, one in facts.activations.items()
        if precision.split()[0] in precisions
    ]
    _table(titles, rows, fits=True, right=titles[1:], last="")
    one = next(iter(facts.activations.values()))
    _print_escaped(ACTIVATION_NOTE.format(batch=one.batch, sequence=one.sequence))


def _print_suggestions(
    limits: Limits, inference: Sequence[InferenceRow], training: Sequence[TrainingRow]
) -> None:
    if limits.hold(0, 0, 0) is None:
        _print_escaped(
            "\nGive --memory (of one device) to see what fits, and the cheapest setting that does."
        )
        return
    found = suggestions(limits, inference, training)
    _print_escaped("\nThe cheapest that fits")
    print_table(["", ""], ([f"  {what}", line] for what, line in found.items()))
    if all(line == NOTHING for what, line in found.items() if what.startswith("train")):
        least = least_memory(training)
        if least is not None:
            _print_escaped(
                f"No way of training fits. The least on a device is {memory_text(least.device)}, on "
                f"{several(least.ranks)} with parallel='{least.parallel}', with {memory_text(least.host)} on the host "
                f"and {memory_text(least.disk)} on the disk for each rank."
            )


def _table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], fits: bool, right: Sequence[str], last: str = "fits"
) -> None:
    titles = [*titles, *([last] if fits and last else [])]
    print_table(titles, [row[: len(titles)] for row in rows], right=right)


def _print_escaped(text: str) -> None:
    click.echo(escaped_lines(text))


def _precision_name(precision: str) -> str:
    return "fp32" if precision == "no" else precision.replace("gathered", "with ZeRO")


def _yes(fits: bool | None) -> str:
    return "yes" if fits else "no"
