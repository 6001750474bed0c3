"""Launching on this machine, alone or as one of several.

What runs the launch is imported inside :func:`launch`, torch after everything that can be refused without it.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import uuid
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.sources import (
    CONTROL_FILE_VARIABLE,
    CONTROL_VARIABLE,
    SECRET_VARIABLE,
    SHARED_CONSOLE_VARIABLE,
    export_environment,
    inherited_environment,
    restore_environment,
)
from lockstep.control import Secret, derived, new_secret, read_secret, user_secret
from lockstep.control.session import name_of
from lockstep.errors import ConfigError
from lockstep.launch.backend import Command
from lockstep.launch.console import make_log_folder, say
from lockstep.launch.guard_process import GuardProcess, run_guarded
from lockstep.launch.network import LOOPBACK, RendezvousAddress, find_rendezvous_address, loopback_interface
from lockstep.launch.plan import ALIAS, LaunchPlan
from lockstep.launch.signals import Interrupted, Signals

if TYPE_CHECKING:
    from lockstep.launch.coordinator_server import CoordinatorServer
    from lockstep.launch.progress import LaunchProgress

ALONE = RendezvousAddress(LOOPBACK, LOOPBACK, None, True)


def commands(plan: LaunchPlan) -> list[Command]:
    """Return what each process on this machine runs."""
    return [Command(plan.command, f"{plan.nproc} processes on this machine, each", plan.environment)]


def launch(plan: LaunchPlan) -> int:
    """Run a plan's processes on this machine and return the exit code of the launch.

    Raises:
        ConfigError: the log directory cannot be written, a port is taken, an address is not of this
            machine or cannot be reached, or the other machines do not let this one in.
    """
    # Before anything is made: from here on a signal ends this function through ``finally``.
    signals = Signals(plan.fault_policy.watch)
    signals.install()
    try:
        make_log_folder(plan.log_dir)
        rendezvous_address = ALONE if plan.num_machines == 1 else _rendezvous_address(plan)
        secret = _secret(plan)
        return run_guarded(partial(_run, plan, rendezvous_address, secret, signals))
    except Interrupted as error:
        # Before there was anything to end.
        say(f"lockstep: ended by {error.signal.name}; nothing was started.")
        return error.code


def end_process(code: int) -> None:
    """End this process at once; torch's teardown of an idle launcher would take a third of a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(
    plan: LaunchPlan,
    rendezvous_address: RendezvousAddress,
    secret: Secret,
    signals: Signals,
    guarded: GuardProcess,
    work_dir: str,
) -> int:
    from lockstep.launch.rendezvous import LauncherIdentity, Rendezvous

    _export(plan, rendezvous_address)
    machine = uuid.uuid4().hex
    run = f"{Path(_script(plan.command)).name} on {_range(plan)}"
    with ExitStack() as stack:
        server = _host(plan, rendezvous_address, secret, machine, run)
        if server is not None:
            stack.callback(server.close)
        address = server.address if server is not None else (rendezvous_address.master, plan.port or 0)
        identity = LauncherIdentity(
            run=run,
            nproc=plan.nproc,
            rank=plan.machine_rank if plan.num_machines > 1 else None,
            own_address=rendezvous_address.own,
            store_port=plan.port or 0 if plan.num_machines == 1 else 0,
        )
        limit_s = plan.fault_policy.join_timeout_s
        # A coordinator in this process is not judged: when it stood still, so did this one.
        silence_s = None if server is not None else plan.fault_policy.heartbeat_limit_s
        rendezvous = Rendezvous(address, secret, identity, say, machine, limit_s, silence_s)
        stack.callback(rendezvous.close)
        progress = _progress(plan, server)
        if progress is not None:
            stack.callback(progress.close)

        def upkeep() -> None:
            if progress is not None:
                progress.update()

        def interrupted(name: str, code: int) -> None:
            if server is not None:
                server.interrupt(name, code)
            else:
                rendezvous.tell("leave", signal=name, code=code)

        signals.defer()
        # Collections are a tenth of the time of importing torch.
        gc.disable()
        from lockstep.launch.agent import Agent
        from lockstep.launch.workers import Starter

        # What was imported stays as long as this process: no collection needs to look at it.
        gc.freeze()
        gc.enable()
        _silence_torch()
        control = _control(plan, address, secret, work_dir)
        starter = Starter(plan, work_dir, guarded.launch_id, control)
        agent = Agent(plan, rendezvous, server is not None, starter, upkeep, signals, interrupted, say)
        return agent.run()


def _host(
    plan: LaunchPlan, rendezvous_address: RendezvousAddress, secret: Secret, machine: str, run: str
) -> CoordinatorServer | None:
    """Return the coordinator, if it is for this machine to host; among machines without numbers, the first one does."""
    if not rendezvous_address.here or plan.machine_rank:
        if plan.machine_rank == 0 and plan.num_machines > 1:
            raise ConfigError(
                f"main_process_ip {plan.address} is not an address of this machine, which has machine_rank 0. On "
                "all machines, set main_process_ip to the address of this machine, or correct machine_rank."
            )
        return None
    from lockstep.launch.coordinator_server import CoordinatorServer

    # On one machine the port is that of the store.
    port = (plan.port or 0) if plan.num_machines > 1 else 0
    try:
        return CoordinatorServer(plan, secret, rendezvous_address.master, port, machine, run, say)
    except ConfigError:
        if plan.num_machines > 1 and plan.machine_rank is None:
            # Another launcher here was first, or what listens there will be refused.
            return None
        raise


def _progress(plan: LaunchPlan, server: CoordinatorServer | None) -> LaunchProgress | None:
    """Return the line of progress, where somebody may see one: on the machine that hosts the coordinator."""
    if server is None or not plan.fault_policy.watch:
        return None
    from lockstep.launch.progress import STDERR, LaunchProgress, StatusRow, wants_line

    if not wants_line(plan.quiet, inherited_environment().get("TERM", "")):
        return None
    return LaunchProgress(server.latest, StatusRow(STDERR))


def _rendezvous_address(plan: LaunchPlan) -> RendezvousAddress:
    assert plan.address is not None, "checked with the settings"
    assert plan.port is not None
    return find_rendezvous_address(plan.address, plan.port, plan.interface)


def _secret(plan: LaunchPlan) -> Secret:
    """Return what this launch's machines and workers know. The user's own secret is only what it is made of."""
    given = inherited_environment().get(SECRET_VARIABLE)
    # The workers have no use for it.
    if given:
        rest = inherited_environment()
        del rest[SECRET_VARIABLE]
        restore_environment(rest)
    if plan.num_machines == 1:
        return new_secret()
    if plan.secret_file is not None:
        secret = read_secret(Path(plan.secret_file).expanduser())
    else:
        secret = Secret.from_hex(given) if given else user_secret()
    return derived(secret, "launch")


def _control(plan: LaunchPlan, address: tuple[str, int], secret: Secret, work_dir: str) -> dict[str, str]:
    """Return where workers find the coordinator, and its secret in a file: variables are shown, logged and handed
    on."""
    if not plan.fault_policy.watch:
        return {}
    path = os.path.join(work_dir, "control")
    # With its mode from the start, so that no moment is left in which others could read it.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secret.hex())
    return {CONTROL_VARIABLE: name_of(address), CONTROL_FILE_VARIABLE: path}


def _export(plan: LaunchPlan, rendezvous_address: RendezvousAddress) -> None:
    """Export what the workers inherit: the plan's settings, and the interface to use.

    torch's multiprocessing takes no signals over: one that arrived meanwhile would end this process.
    """
    values = {**plan.environment, "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    values[SHARED_CONSOLE_VARIABLE] = "0" if plan.log_dir is not None else "1"
    interface = loopback_interface() if plan.num_machines == 1 else rendezvous_address.interface
    for name in (
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if plan.num_machines > 1 else ("GLOO_SOCKET_IFNAME",)
    ):
        if interface is not None and not inherited_environment().get(name):
            values[name] = interface
    export_environment(values)


def _script(command: tuple[str, ...]) -> str:
    """Return what a command runs, for people: the script or module, not the interpreter."""
    words = (
        [word for word in command[1:] if word not in ("-m", ALIAS)]
        if command[0] == sys.executable
        else list(command)
    )
    return words[0] if words else command[0]


def _range(plan: LaunchPlan) -> str:
    least = f"{plan.min_machines} to " if plan.elastic else ""
    return f"{least}{plan.num_machines} machine{'' if plan.num_machines == 1 else 's'}"


def _silence_torch() -> None:
    """Silence torch's own warnings, which repeat rank by rank what one sentence says at the end."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
