"""Launching on this machine, alone or as one of several, through torch's elastic agent.

torch is imported inside :func:`launch`, after everything that can be refused without it.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.sources import export_environment, inherited_environment
from lockstep.errors import ConfigError
from lockstep.launch import exec_worker, guard
from lockstep.launch.plan import LaunchPlan
from lockstep.launch.report import Failure, describe, exit_code, first_failure

if TYPE_CHECKING:
    from lockstep.launch.logs import RankLogs

# between the polite signal and SIGKILL; with it a launch is over within 2 s of its end being decided
GRACE_S = 1.5
MONITOR_INTERVAL_S = 0.1
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
GUARD_WAIT_S = 2.0
LOOPBACK_INTERFACE = "lo"


def launch(plan: LaunchPlan) -> int:
    """Run a plan's processes on this machine and return the exit code: 0, or that of the first failure.

    Raises:
        ConfigError: the log directory cannot be written, or the requested port is taken.
    """
    launch_id = uuid.uuid4().hex
    work_dir = tempfile.mkdtemp(prefix="lockstep-")
    try:
        if plan.log_dir is not None:
            _make_directory(plan.log_dir)
        with _guarded(launch_id) as finished:
            export_environment(_environment(plan, launch_id))
            code = _run_agent(plan, work_dir)
            if code == 0:
                finished()
            return code
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def end_process(code: int) -> None:
    """End this process at once; torch's teardown of an idle launcher would take a third of a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_agent(plan: LaunchPlan, work_dir: str) -> int:
    gc.disable()  # collections are a tenth of the time of importing torch
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from lockstep.launch.agent import BoundedAgent
    from lockstep.launch.logs import RankLogs
    from lockstep.launch.rendezvous import rendezvous_handler

    gc.freeze()
    gc.enable()
    _silence_agent()
    if plan.num_machines > 1:
        _say(
            f"lockstep launch: machine {plan.machine_rank} of {plan.num_machines}, {plan.nproc} processes; "
            f"meeting at {plan.address}:{plan.port}."
        )
    logs = RankLogs(work_dir, plan.log_dir, plan.tee)
    handler = rendezvous_handler(plan)
    spec = WorkerSpec(
        role="default",
        local_world_size=plan.nproc,
        entrypoint=sys.executable,
        args=worker_arguments(plan.command),
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        # for the static rendezvous the workers meet in the agents' store
        master_addr=plan.address if plan.num_machines > 1 and plan.rdzv_backend == "static" else None,
        master_port=plan.port if plan.num_machines > 1 and plan.rdzv_backend == "static" else None,
    )
    agent = BoundedAgent(spec, logs, grace_s=GRACE_S)
    try:
        result = agent.run()
    except SignalException as error:
        _say(f"lockstep launch: ended by {error.sigval.name}; all processes were ended.")
        return 128 + int(error.sigval)
    finally:
        handler.shutdown()
    if not result.is_failed():
        return 0
    failures = [
        _failure(rank, process, logs, agent.failed_by_themselves) for rank, process in result.failures.items()
    ]
    first = first_failure(failures)
    _say(describe(first, plan.nproc * plan.num_machines))
    return exit_code(first)


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def worker_arguments(command: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments of the interpreter for a worker; ``$`` is doubled because the agent expands templates."""
    escaped = (part.replace("$", "$$") for part in command)
    # -I -S: neither the user's site nor PYTHON* variables concern the program in between
    return ("-I", "-S", os.path.abspath(exec_worker.__file__), str(os.getpid()), *escaped)


def _environment(plan: LaunchPlan, launch_id: str) -> dict[str, str]:
    values = {**plan.environment, guard.ID_VARIABLE: launch_id, "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS}
    said = inherited_environment().get("GLOO_SOCKET_IFNAME")
    if plan.num_machines == 1 and not said and LOOPBACK_INTERFACE in _interfaces():
        values["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE  # nobody outside this machine is concerned
    return values


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []


def _failure(rank: int, process: Any, logs: RankLogs, by_themselves: frozenset[int] | None) -> Failure:
    data = process.error_file_data if isinstance(process.error_file_data, dict) else {}
    local_rank, code = process.local_rank, process.exitcode
    return Failure(
        rank=rank,
        exit_code=code,
        report=data if isinstance(data.get("message"), dict) else {},
        stderr_file=None if logs.tee else logs.stderr_of.get(local_rank),
        ended_by_us=code == -signal.SIGTERM if by_themselves is None else local_rank not in by_themselves,
    )


def _make_directory(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--log-dir {path}: cannot be made: {reason}. Name another directory.") from None


def _silence_agent() -> None:
    """The agent's own warnings repeat, rank by rank, what one sentence says at the end."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _guarded(launch_id: str) -> Iterator[Any]:
    """A process that ends all workers when this one is gone; call what is yielded when there is nothing to end."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(guard.__file__), launch_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is not for it
    )
    assert process.stdin is not None
    pipe = process.stdin

    def finished() -> None:
        with suppress(OSError):  # the guard was killed; nothing to tell
            pipe.write(guard.DONE)

    try:
        yield finished
    finally:
        try:
            pipe.close()
            process.wait(GUARD_WAIT_S)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
