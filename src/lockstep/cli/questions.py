"""The questions of ``lockstep config``: few, in order, with defaults of this machine; Enter takes a default."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import click

from lockstep.cli.values import IntegerRange, value_type
from lockstep.config.settings import SETTINGS
from lockstep.config.values import MAX_PORT, USUAL_PORT

SHARDING = {
    "none": "",
    "zero=1": "the optimizer's state",
    "zero=2": "and gradients",
    "zero=3": "and weights",
}
BACKENDS = ("no", "inductor", "aot_eager", "eager", "cudagraphs")


def ask() -> dict[str, object]:
    """The answers, by the names of settings."""
    gpus = count_gpus()
    click.echo(f"This machine has {gpus} GPUs. Enter takes the answer in brackets.", err=True)
    answers: dict[str, Any] = _machines()
    machines = answers["num_machines"]
    answers["use_cpu"] = click.confirm("Train on CPUs only", default=gpus == 0)
    usual = machines if answers["use_cpu"] or not gpus else machines * gpus
    answers["num_processes"] = click.prompt(
        "How many processes over all machines", default=usual, type=value_type(SETTINGS["num_processes"])
    )
    answers["mixed_precision"] = click.prompt(
        "Mixed precision",
        default="no" if answers["use_cpu"] else "bf16",
        type=value_type(SETTINGS["mixed_precision"]),
    )
    if answers["num_processes"] > 1:
        answers |= _sharding()
    steps = SETTINGS["gradient_accumulation_steps"]
    answers[steps.name] = click.prompt(
        "Micro-batches in a step", default=steps.default, type=value_type(steps)
    )
    return answers | _compilation()


def _machines() -> dict[str, object]:
    machines = click.prompt("How many machines", default=1, type=value_type(SETTINGS["min_machines"]))
    answers: dict[str, object] = {"num_machines": machines}
    if machines > 1:
        answers["machine_rank"] = click.prompt(
            "Number of this machine, from 0", default=0, type=IntegerRange(0, machines - 1)
        )
        answers["main_process_ip"] = click.prompt("Address of machine 0")
        answers["main_process_port"] = click.prompt(
            "Port there", type=IntegerRange(1, MAX_PORT), default=USUAL_PORT
        )
    return answers


def _sharding() -> dict[str, object]:
    meanings = ", ".join(f"{word}: {what}" for word, what in SHARDING.items() if what)
    stage = click.prompt(f"Sharding ({meanings})", default="none", type=click.Choice(list(SHARDING)))
    if stage == "none":
        return {}
    words = [stage]
    if click.confirm("Keep weights and the optimizer's state in host memory", default=False):
        words.append("offload")
    if click.confirm("Compute activations again in backward, to save memory", default=False):
        words.append("activation=full")
    return {"parallel": " ".join(words)}


def _compilation() -> dict[str, object]:
    backend = click.prompt("Compile with torch.compile", default="no", type=click.Choice(BACKENDS))
    if backend == "no":
        return {}
    answers: dict[str, object] = {"dynamo_backend": backend}
    if not click.confirm("With other options than the usual ones", default=False):
        return answers
    mode = SETTINGS["dynamo_mode"]
    answers[mode.name] = click.prompt("Mode", default=mode.kind.words[0], type=value_type(mode))
    for name, question in (
        ("dynamo_use_fullgraph", "Fail where a model does not compile to one graph"),
        ("dynamo_use_dynamic", "Compile for all shapes"),
        ("dynamo_use_regional_compilation", "Compile repeated blocks one by one"),
    ):
        if click.confirm(question, default=False):
            answers[name] = True
    return answers


def count_gpus() -> int:
    """GPUs of NVIDIA that their driver lists, without importing torch; 0 where it is not there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
