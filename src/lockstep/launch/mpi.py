"""Launching by the mpirun that is installed, which starts each worker itself. There is no agent, and so no restarts.

Seen with Open MPI 4.1 and 5.0.11, MPICH 5.0.2 and Intel MPI 2021.18; the last two have Hydra as their launcher.
"""

from __future__ import annotations

import re
import signal
import subprocess
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

# Open MPI's tag of a line: [job,rank]<stdout>: Hydra is told to write the same one.
TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>:")
HYDRA_TAG = "[1,%r]<stdout>:"
SHOWN_PORT = 0
VERSION_LIMIT_S = 20.0


def commands(plan: LaunchPlan) -> list[Command]:
    """mpirun, with the variables that it hands to the workers."""
    program = mpirun(plan, inherited_environment(), SHOWN_PORT, is_hydra())
    return [replace(program, environment=without_secrets(program.environment))]


def launch(plan: LaunchPlan) -> int:
    """Run a plan by mpirun and return its exit code, which is that of the rank that failed first.

    Raises:
        ConfigError: restarts or other machines were asked for, which mpirun alone cannot do; or it is not installed.
    """
    from lockstep.launch.guard_process import run_guarded

    port = free_port() if plan.num_machines == 1 else SHOWN_PORT
    program = mpirun(plan, inherited_environment(), port, is_hydra())
    programs = Programs([program], plan.fault_policy.grace_s, least=1, translate=_signal_for)
    return run_guarded(lambda *_: programs.run())


def is_hydra() -> bool:
    """Return whether the ``mpirun`` that is installed is Hydra, of MPICH or Intel MPI, which has other words."""
    try:
        asked = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, check=False, timeout=VERSION_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "HYDRA" in asked.stdout or "Intel(R) MPI" in asked.stdout


def mpirun(plan: LaunchPlan, environ: Mapping[str, str], free: int, hydra: bool = False) -> Command:
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
    if hydra:
        # Intel's binds each rank to cores of its own choice.
        values.setdefault("I_MPI_PIN", "0")
        words = _words_of_hydra(plan, total, sorted(values))
    else:
        words = _words_of_open_mpi(plan, total, sorted(values))
    return Command(
        title=f"{total} processes",
        arguments=(*words, *plan.command),
        shown=tagged,
        environment=values,
    )


def _words_of_open_mpi(plan: LaunchPlan, total: int, names: list[str]) -> list[str]:
    words = [
        "mpirun",
        "-np",
        str(total),
        "--map-by",
        f"ppr:{plan.nproc}:node",
        "--bind-to",
        "none",
        "--tag-output",
    ]
    if plan.transport.hosts:
        words += ["--host", ",".join(f"{host.target}:{plan.nproc}" for host in plan.transport.hosts)]
    elif plan.num_machines == 1:
        words += ["--host", f"localhost:{plan.nproc}"]
    return [*words, *(word for name in names for word in ("-x", name)), "--"]


def _words_of_hydra(plan: LaunchPlan, total: int, names: list[str]) -> list[str]:
    # Its mpirun can be a script that keeps signals to itself.
    words = ["mpiexec.hydra", "-n", str(total), "-ppn", str(plan.nproc), "-prepend-pattern", HYDRA_TAG]
    if plan.transport.hosts:
        words += ["-hosts", ",".join(host.target for host in plan.transport.hosts)]
    elif plan.num_machines == 1:
        # Inside of a job it would take the job's machines, and srun to start there.
        words += ["-launcher", "fork", "-hosts", "localhost"]
    return [*words, "-genvlist", ",".join(names)]


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
