"""``lockstep estimate``: what a model needs to run and to train, and the cheapest setting that fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lockstep.plan.estimate import InferenceRow, Limits, TrainingRow
    from lockstep.plan.estimate_model import ModelFacts
    from lockstep.plan.traffic import AveragingTime

EPILOG = """\b
Examples:
  lockstep estimate path/to/model.py:Model --args '{"depth": 12}'
  lockstep estimate downloads/llama --memory 24GB --host-memory 64GB --ranks 1,4
  lockstep estimate config.json --memory 80GB --batch 4 --sequence 4096
  lockstep estimate weights.safetensors --memory 8GB --cpu
  lockstep estimate 1.3B --ranks 1,2,4,8
  lockstep estimate config.json --ranks 8,64 --bandwidth 12GB
"""

MAX_RANKS = 16


@click.command("estimate", epilog=EPILOG)
@click.argument("model")
@click.option("--args", "arguments", metavar="JSON", help="Keyword arguments of the class or function.")
@click.option("--memory", metavar="SIZE", help="Memory of one device: 24GB, 80GiB.")
@click.option("--host-memory", metavar="SIZE", help="Memory of one machine.")
@click.option("--disk", metavar="SIZE", help="Free space on a machine's disk.")
@click.option("--cpu", is_flag=True, help="The device is the CPU; --memory is that of one machine.")
@click.option("--ranks", default="1,2,8", metavar="LIST", help="Numbers of processes (default: 1,2,8).")
@click.option(
    "--ranks-per-machine", default="8", metavar="N", help="Processes that share a machine (default: 8)."
)
@click.option("--precision", default="no,bf16", metavar="LIST", help="Mixed precision (default: no,bf16).")
@click.option("--optimizer", default="adamw", metavar="NAME", help="adamw, sgd, lion, ... (default: adamw).")
@click.option("--batch", metavar="N", help="Rows of one micro-batch, to count activations too.")
@click.option("--sequence", metavar="N", help="Tokens in a row, to count activations too.")
@click.option(
    "--bandwidth",
    metavar="SIZE",
    help="Bytes a second of a link, in each direction: 12GB. Shows how long averages of gradients take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, arguments: str | None, optimizer: str, as_json: bool, **options: Any) -> None:
    """Count the memory of MODEL, and show which settings fit.

    MODEL is a module path (package.module:Class or file.py:function), the folder or config.json of a transformers
    model, a folder or file of safetensors, or a number of parameters (7B). No weights are made or read.
    """
    from lockstep.cli.values import process_counts
    from lockstep.config.files import parse_json
    from lockstep.config.values import parse_integer, parse_precision
    from lockstep.plan.estimate import inference_rows, training_rows

    ranks = list(dict.fromkeys(process_counts(options["ranks"], "--ranks", MAX_RANKS)))
    precisions = [str(parse_precision(part, "--precision")) for part in options["precision"].split(",")[:4]]
    batch, sequence = options["batch"], options["sequence"]
    if (batch is None) != (sequence is None):
        raise click.UsageError(
            "--batch and --sequence together are the size of a micro-batch, but one of them is missing. Give both."
        )
    size = (0, 0) if batch is None else (
        parse_integer(batch, "--batch", 1, 2**20), parse_integer(sequence, "--sequence", 1, 2**24)
    )  # fmt: skip
    keywords = parse_json(arguments, "--args") if arguments is not None else {}

    from lockstep.plan.estimate_load import facts_of

    facts = facts_of(model, keywords, *size)
    limits = _limits(options)
    training = training_rows(facts, ranks, list(dict.fromkeys(precisions)), optimizer, limits)
    inference = inference_rows(facts, limits)
    averaging = _averaging(facts, ranks, options["bandwidth"])
    if as_json:
        data = _as_data(facts, limits, inference, training, optimizer)
        click.echo(json.dumps(data | {"averaging": [asdict(one) for one in averaging]}, indent=2))
        return
    from lockstep.cli.estimate_text import print_averaging, print_estimate

    print_estimate(facts, limits, inference, training, optimizer)
    print_averaging(averaging, options["bandwidth"])


def _averaging(facts: ModelFacts, ranks: Sequence[int], bandwidth: str | None) -> list[AveragingTime]:
    """Return how long float32 gradients take to be averaged; nothing without a bandwidth."""
    if bandwidth is None:
        return []
    from lockstep.config.values import bytes_of
    from lockstep.plan.traffic import averaging_time

    speed = bytes_of(bandwidth, "--bandwidth", 1)
    return [averaging_time(4 * facts.trainable, count, speed) for count in ranks]


def _limits(options: dict[str, Any]) -> Limits:
    from lockstep.config.values import bytes_of, parse_integer
    from lockstep.plan.estimate import Limits

    sizes = {
        name: None if options[name] is None else bytes_of(options[name], f"--{name.replace('_', '-')}")
        for name in ("memory", "host_memory", "disk")
    }
    if options["cpu"] and sizes["host_memory"] is not None:
        raise click.UsageError(
            "With --cpu the device is the host, so --host-memory cannot differ from --memory. Give the memory of "
            "the machine as --memory, and drop --host-memory."
        )
    together = parse_integer(options["ranks_per_machine"], "--ranks-per-machine", 1, 1024)
    return Limits(sizes["memory"], sizes["host_memory"], sizes["disk"], together, options["cpu"])


# -- data ----------------------------------------------------------------------------------------------


def _as_data(
    facts: ModelFacts,
    limits: Limits,
    inference: Sequence[InferenceRow],
    training: Sequence[TrainingRow],
    optimizer: str,
) -> dict[str, object]:
    from lockstep.plan.estimate import suggestions

    name, largest = facts.largest()
    return {
        "model": facts.name,
        "kind": facts.kind,
        "parameters": facts.count,
        "trainable": facts.trainable,
        "buffers": sum(facts.buffers.values()),
        "bytes": facts.nbytes(),
        "dtypes": dict(facts.parameters),
        "blocks": facts.blocks,
        "largest": {"name": name, "bytes": largest},
        "activations": {precision: asdict(one) for precision, one in (facts.activations or {}).items()},
        "limits": asdict(limits),
        "optimizer": optimizer,
        "inference": [asdict(row) for row in inference],
        "training": [_training_data(row) for row in training],
        "suggestions": suggestions(limits, inference, training),
        "notes": list(facts.notes),
    }


def _training_data(row: TrainingRow) -> dict[str, object]:
    data = asdict(row)
    state = data.pop("state")
    return data | {"state": state and {name: state[name] for name in ("weights", "gradients", "optimizer")}}
