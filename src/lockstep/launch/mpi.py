"""Launching by Open MPI's mpirun, which starts each worker itself. There is no agent, and so no restarts."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import replace

from lockstep.config.settings import THREADS_VARIABLE
from lockstep.config.sources import inherited_environment
from lockstep.errors import ConfigError
from lockstep.launch.backend import Command, forwarded, without_secrets
from lockstep.launch.hosts import meeting_point
from lockstep.launch.network import LOOPBACK, free_port
from lockstep.launch.plan import LaunchPlan, available_cores
from lockstep.launch.programs import Programs

# mpirun's tag of a line: [job,rank]<stdout>:
TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>:")
SHOWN_PORT = 0


def commands(plan: LaunchPlan) -> list[Command]:
    """mpirun, with the variables that it hands to the workers."""
    program = mpirun(plan, inherited_environment(), SHOWN_PORT)
    return [replace(program, environment=without_secrets(program.environment))]


def launch(plan: LaunchPlan) -> int:
    """Run a plan by mpirun and return its exit code, which is that of the rank that failed first.

    Raises:
        ConfigError: restarts or other machines were asked for, which mpirun alone cannot do; or it is not installed.
    """
    from lockstep.launch.guard_process import run_guarded

    port = free_port() if plan.num_machines == 1 else SHOWN_PORT
    program = mpirun(plan, inherited_environment(), port)
    programs = Programs([program], plan.fault_policy.grace_s, least=1, translate=_signal_for)
    return run_guarded(lambda *_: programs.run())


def mpirun(plan: LaunchPlan, environ: Mapping[str, str], free: int) -> Command:
    """mpirun with its hosts, and names of variables; their values are in its environment.

    ``free`` is a port of this machine, for a run that is here alone.
    """
    _check(plan, environ)
    total = plan.nproc * plan.num_machines
    values = {
        **forwarded(environ, plan.transport.forward_env),
        THREADS_VARIABLE: str(max(1, available_cores() // plan.nproc)),
        **plan.environment,
        **_rendezvous_variables(plan, free),
    }
    words = [
        "-np",
        str(total),
        "--map-by",
        f"ppr:{plan.nproc}:node",
        "--bind-to",
        "none",
        "--tag-output",
        "-q",
    ]
    if plan.transport.hosts:
        words += ["--host", ",".join(f"{host.target}:{plan.nproc}" for host in plan.transport.hosts)]
    elif plan.num_machines == 1:
        words += ["--host", f"localhost:{plan.nproc}"]
    for name in sorted(values):
        words += ["-x", name]
    return Command(
        title=f"{total} processes",
        arguments=("mpirun", *words, "--", *plan.command),
        shown=tagged,
        environment=values,
    )


def tagged(line: bytes) -> bytes:
    """Return a line with its rank. mpirun tags what it reads at once: a part of a line, or several ranks'."""
    before, *parts = TAG.split(line)
    text, last = before, b""
    for rank, content in zip(parts[::2], parts[1::2], strict=True):
        if rank != last:
            text += (b"\n" if last else b"") + b"[rank " + rank + b"] "
        text, last = text + content, rank
    return text


def _rendezvous_variables(plan: LaunchPlan, free: int) -> dict[str, str]:
    if plan.num_machines == 1:
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(plan.port or free or "<a free port>")}
    address, port = meeting_point(plan)
    return {"MASTER_ADDR": str(address), "MASTER_PORT": str(port)}


def _check(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    if plan.elastic or plan.fault_policy.max_restarts:
        what = "min_machines" if plan.elastic else f"max_restarts {plan.fault_policy.max_restarts}"
        raise ConfigError(
            f"{what} asks for restarts, but mpirun ends all processes when one fails. Use --hosts or --slurm instead."
        )
    if plan.log_dir is not None:
        raise ConfigError(
            "--log-dir is not available with --mpi. Use mpirun's own --output-filename, or --hosts."
        )
    if plan.num_machines > 1 and not plan.transport.hosts:
        if "SLURM_JOB_ID" not in environ:
            raise ConfigError(
                f"num_machines is {plan.num_machines}, but mpirun does not know which machines to use. Set "
                "--hosts or --hostfile."
            )
        if plan.address is None:
            raise ConfigError(
                "main_process_ip is not set, and mpirun chooses the machines. Set --rdzv to the first machine."
            )


def _signal_for(number: signal.Signals, again: bool) -> signal.Signals:
    """Return what mpirun gets: it hands SIGUSR1 and SIGUSR2 to the workers, and ends them at the others."""
    if again:
        return signal.SIGTERM
    return signal.SIGUSR1 if number == signal.SIGTERM else number
