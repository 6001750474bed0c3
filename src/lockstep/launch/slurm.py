"""Launching by Slurm: srun inside an allocation, otherwise a batch job that does it later.

    python -m lockstep.launch.slurm PLAN

is what the batch job runs; PLAN is the plan as JSON.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.config.settings import THREADS_VARIABLE
from lockstep.config.sources import inherited_environment
from lockstep.errors import ConfigError, LockstepError
from lockstep.launch import node
from lockstep.launch.backend import SECRET, Command, forwarded, is_secret
from lockstep.launch.machines import allocated_nodes
from lockstep.launch.node import as_line, from_line, plan_as_data, plan_from_data
from lockstep.launch.plan import LaunchPlan
from lockstep.launch.programs import NOT_FOUND, Programs
from lockstep.runtime.failure import PREEMPTED

# The machines and the environment are settings of the launch.
OWN_OPTIONS = frozenset(
    {"nodes", "ntasks", "ntasks-per-node", "export", "input", "label", "parsable", "wrap"}
)
# Ours: what a batch job does when it was stopped with its state saved.
AFTER_STOP = "after-stop"
REQUEUE = "requeue"
ALWAYS_EXPORTED = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR")
STOP_SIGNAL = "USR1@90"
LABEL = re.compile(rb"^ *(\d+): ")
PORTS = range(20_000, 30_000)


def commands(plan: LaunchPlan) -> list[Command]:
    """srun with what each node reads, or sbatch with its script."""
    environ = inherited_environment()
    if "SLURM_JOB_ID" in environ:
        return [srun(plan, SECRET, environ, os.getcwd())]
    return [Command(sbatch_arguments(plan, environ), title="a batch job", stdin=batch_script(plan))]


def launch(plan: LaunchPlan) -> int:
    """Run a plan by srun and return the exit code of the launch; or submit it and return that of sbatch.

    Raises:
        ConfigError: an option is not for the user to set, or Slurm is not installed.
    """
    environ = inherited_environment()
    if "SLURM_JOB_ID" in environ:
        from lockstep.launch.backend import secret_for_machines

        program = srun(plan, secret_for_machines(plan).hex(), environ, os.getcwd())
        code = Programs([program], plan.fault_policy.grace_s, least=1).run()
        if code == PREEMPTED and plan.transport.options.get(AFTER_STOP) == REQUEUE:
            _run(("scontrol", "requeue", environ["SLURM_JOB_ID"]))
        return code
    return _run(sbatch_arguments(plan, environ), batch_script(plan))


def srun(plan: LaunchPlan, secret: str, environ: Mapping[str, str], directory: str) -> Command:
    """Return the step with one task on each node. Every task reads the same document; Slurm numbers them."""
    nodes = min(plan.num_machines, allocated_nodes(environ) or plan.num_machines)
    port = plan.port or _port(environ)
    own = replace(plan, num_machines=nodes, min_machines=min(plan.min_machines, nodes), port=port)
    description = node.node_of(own, secret, environ, directory, node.SLURM)
    words = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--label"]
    # Every node needs the whole environment of a login, not of this process: only names, values are Slurm's to carry.
    words.append("--export=" + ",".join(ALWAYS_EXPORTED))
    # srun ends a step 30 s after the first task has ended; an elastic one goes on.
    words.append("--wait=0" if plan.elastic else "--wait=30")
    words += ["--no-kill"] if plan.elastic else []
    cores = environ.get("SLURM_CPUS_PER_TASK") or _cores(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if cores and "cpus-per-task" not in plan.transport.options:
        # Otherwise a node's one task would get one core.
        words.append(f"--cpus-per-task={cores}")
    words += _options(plan)
    return Command(
        title=f"{nodes} node{'' if nodes == 1 else 's'} of job {environ['SLURM_JOB_ID']}",
        arguments=("srun", *words, sys.executable, *node.ARGUMENTS),
        shown=_relabelled,
        stdin=description.line(),
    )


def sbatch_arguments(plan: LaunchPlan, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that submits the job; its script is read from the standard input.

    Raises:
        ConfigError: a secret was to travel, which Slurm would keep in a file.
    """
    kept = [name for name in plan.transport.forward_env if is_secret(name)]
    if kept:
        raise ConfigError(
            f"forward_env names {kept[0]}, which sbatch would store in Slurm's files. Let the script read it "
            "from a file that only you can read, or launch inside an allocation (salloc)."
        )
    names = sorted({*forwarded(environ, plan.transport.forward_env), *ALWAYS_EXPORTED} & set(environ))
    nodes = f"{plan.min_machines}-{plan.num_machines}" if plan.elastic else str(plan.num_machines)
    words = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--export={','.join(names)}"]
    given = plan.transport.options
    if "job-name" not in given:
        words.append("--job-name=lockstep")
    if "signal" not in given:
        words.append(f"--signal={STOP_SIGNAL}")
    if "no-requeue" not in given and "requeue" not in given:
        words.append("--requeue")
    if "open-mode" not in given:
        words.append("--open-mode=append")
    if not {"cpus-per-task", "exclusive", "cpus-per-gpu"} & set(given):
        words.append(f"--cpus-per-task={plan.nproc * int(plan.environment.get(THREADS_VARIABLE, 1))}")
    return ("sbatch", *words, *_options(plan))


def batch_script(plan: LaunchPlan) -> str:
    """Return what the first node of the job runs. The plan is one quoted word of ASCII without line breaks."""
    after = {AFTER_STOP: REQUEUE} if plan.transport.options.get(AFTER_STOP) == REQUEUE else {}
    inner = replace(plan, transport=replace(plan.transport, options=after))
    words = (sys.executable, "-m", "lockstep.launch.slurm", as_line(plan_as_data(inner)))
    return f"#!/bin/sh\nexec {shlex.join(words)}\n"


def _options(plan: LaunchPlan) -> list[str]:
    """Return the user's long options; one without a value is a switch."""
    words = []
    for key, value in plan.transport.options.items():
        if key == AFTER_STOP:
            if value != REQUEUE:
                raise ConfigError(
                    f"slurm_options {AFTER_STOP}={value} is not known. Use {AFTER_STOP}={REQUEUE}."
                )
            continue
        if key in OWN_OPTIONS or len(key) == 1:
            raise ConfigError(
                f"slurm_options has {key}, which the launch sets itself, or which is not a long option. Use "
                "--nnodes, --nproc and --forward-env, and long options without their dashes."
            )
        words.append(f"--{key}={value}" if value else f"--{key}")
    return words


def _cores(per_node: str) -> str:
    """Return the least of Slurm's numbers of cores, such as ``72(x2),36``; empty when it says none."""
    numbers = [int(text) for text in re.sub(r"\(x\d+\)", "", per_node).split(",") if text.isdigit()]
    return str(min(numbers)) if numbers else ""


def _port(environ: Mapping[str, str]) -> int:
    """Return a port that jobs on one node do not share: it follows from the job's number."""
    job = environ.get("SLURM_JOB_ID", "")
    return PORTS[int(job) % len(PORTS)] if job.isdigit() else PORTS[0]


def _relabelled(line: bytes) -> bytes:
    """Replace srun's label of a line, the task's number, by the machine's."""
    return LABEL.sub(rb"[machine \1] ", line)


def _run(arguments: tuple[str, ...], text: str = "") -> int:
    try:
        return subprocess.run(arguments, input=text.encode(), check=False).returncode
    except FileNotFoundError:
        raise ConfigError(NOT_FOUND.format(program=arguments[0])) from None


def main(argv: list[str]) -> int:
    """Return what the batch job does."""
    try:
        plan = plan_from_data(from_line(argv[1]))
        if plan.transport.backend != node.SLURM or not Path("/proc/self").exists():
            raise ConfigError("This plan is not for Slurm. Start it by `lockstep launch --slurm`.")
        return launch(plan)
    except LockstepError as error:
        sys.stderr.write(f"lockstep: error: {error}\n")
        return node.BAD_INPUT


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv))
