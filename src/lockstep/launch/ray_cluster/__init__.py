"""Ray: the plan's processes as actors, on this machine or on a cluster.

Ray finds their places, and shows their output. Signals and the words about a failure are those of every launch.
"""

from __future__ import annotations

import os
import sys
import time
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

from lockstep.config.settings import SETTINGS
from lockstep.config.sources import SECRET_VARIABLE, inherited_environment
from lockstep.errors import ConfigError
from lockstep.launch.backend import SECRET, Command, forwarded, without_secrets
from lockstep.launch.console import say
from lockstep.launch.guard_process import run_guarded
from lockstep.launch.plan import FaultPolicy, LaunchPlan
from lockstep.launch.ray_cluster.cluster import (
    LOCAL,
    address,
    connect,
    cpus_of_a_worker,
    ray_environment,
    shortage,
    uses_gpus,
)
from lockstep.launch.ray_cluster.worker import Job, RankProcess, RayEnded, variables_of_ranks
from lockstep.launch.report import Failure, describe_failure, exit_code, first_failure
from lockstep.launch.signals import ReceivedSignals, received_by
from lockstep.lazy import names_of_modules
from lockstep.runtime.failure import PREEMPTED, of_signal

POLL_S = 0.2
# A rank that only lost contact is not the cause; how long the cause has to end.
CAUSE_WAIT_S = 1.5
# Until what was written last is shown.
OUTPUT_S = 1.0
# Each worker has its own; Ray gives it its GPUs.
OF_A_MACHINE = frozenset({"CUDA_VISIBLE_DEVICES", "PATH", "VIRTUAL_ENV", SECRET_VARIABLE})


def commands(plan: LaunchPlan) -> list[Command]:
    """Return what each of Ray's workers runs, and the environment in which this machine talks to Ray.

    Raises:
        ConfigError: the plan asks for something that Ray cannot do.
    """
    check(plan)
    environ = inherited_environment()
    where = address(plan, environ)
    cluster = "a cluster on this machine" if where == LOCAL else f"the cluster at {where}"
    processes = plan.nproc * plan.num_machines
    title = f"{processes} actors of Ray on {cluster}, {cpus_of_a_worker(plan)} CPUs each"
    shown = without_secrets({**ray_environment(plan, environ, SECRET), **job_of(plan).environment})
    return [Command(plan.command, title=title, environment=shown)]


def launch(plan: LaunchPlan) -> int:
    """Run the plan on Ray and return the exit code: 0, or that of the process which failed first.

    Raises:
        ConfigError: the plan asks for something that Ray cannot do, or there is no cluster to join.
        MissingExtraError: Ray is not installed.
    """
    check(plan)
    # Guarded, a cluster of our own is ended as a whole if this process is killed.
    return run_guarded(lambda *_: _connect_and_run(plan))


def check(plan: LaunchPlan) -> None:
    """Raise ConfigError when the plan asks for something that Ray cannot do."""
    if plan.elastic:
        raise ConfigError(
            f"--nnodes {plan.min_machines}:{plan.num_machines} is elastic, but --ray starts a fixed number of "
            f"processes. Write --nnodes {plan.num_machines}; --max-restarts starts them again after a failure."
        )
    if "CUDA_VISIBLE_DEVICES" in plan.environment and plan.num_machines > 1:
        raise ConfigError(
            f"gpu_ids {plan.environment['CUDA_VISIBLE_DEVICES']} names GPUs of one machine, but Ray chooses the "
            "GPUs of a cluster. Remove gpu_ids."
        )
    theirs = {
        "main_process_ip": plan.address,
        "main_process_port": plan.port,
        "interface": plan.interface,
        "secret_file": plan.secret_file,
    }
    if plan.log_dir is not None:
        raise ConfigError(
            f"log_dir is {plan.log_dir}, but Ray brings the output of its workers here, and keeps it in its own logs. "
            "Remove log_dir."
        )
    for name, value in theirs.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value}, but Ray chooses where its workers run, and they find each other. Remove "
                f"{name}."
            )
    if plan.fault_policy.hang_timeout_s != FaultPolicy().hang_timeout_s:
        raise ConfigError(
            f"hang_timeout is {plan.fault_policy.hang_timeout_s:g} s, but on Ray rank 0 watches the others, with "
            f"{FaultPolicy().hang_timeout_s:g} s. Remove hang_timeout."
        )


def job_of(plan: LaunchPlan) -> Job:
    """Return what each rank runs. The interpreter is that of Ray's worker there."""
    environ = inherited_environment()
    watching = {
        SETTINGS["watch"].variable: str(plan.fault_policy.watch).lower(),
        SETTINGS["grace"].variable: f"{plan.fault_policy.grace_s:.17g}",
    }
    values = {**forwarded(environ, plan.transport.forward_env), **watching, **plan.environment}
    environment = {name: value for name, value in values.items() if name not in OF_A_MACHINE}
    python = plan.command[0] == sys.executable
    return Job(plan.command[1:] if python else plan.command, python, os.getcwd(), environment)


def _connect_and_run(plan: LaunchPlan) -> int:
    ray = connect(plan)
    try:
        code = _run(ray, plan)
        time.sleep(OUTPUT_S)
        return code
    finally:
        ray.shutdown()


def _run(ray: Any, plan: LaunchPlan) -> int:
    lack = shortage(plan, ray.cluster_resources(), uses_gpus(plan, ray.cluster_resources()))
    if lack is not None:
        say(f"lockstep: {lack}; waiting for more.")
    # Not raised: Ray's calls swallow what a handler raises.
    received = ReceivedSignals()
    with received_by(received.add):
        for restart in range(plan.fault_policy.max_restarts + 1):
            results = _RayRound(ray, plan, restart, received).run()
            if received.first is not None or not any(_has_failed(one) for one in results):
                break
    stop = received.end or received.stop
    polite = {0, PREEMPTED} if received.stop is None else {0, PREEMPTED, of_signal(SIGTERM)}
    codes = {one.exit_code for one in results}
    if stop is not None and (received.end or len(results) < plan.nproc * plan.num_machines):
        say(f"lockstep: ended by {stop.name}; all processes were ended.")
        return of_signal(stop)
    if stop is not None and codes == {of_signal(SIGTERM)}:
        # All ranks stopped; they have said where.
        return of_signal(stop)
    if codes <= polite:
        return max(codes)
    worst = first_failure([Failure(one.rank, one.exit_code, one.report) for one in results if one.exit_code])
    say(describe_failure(worst, plan.nproc * plan.num_machines))
    return exit_code(worst)


def _has_failed(one: RayEnded) -> bool:
    return one.exit_code not in (0, PREEMPTED)


class _RayRound:
    """All ranks once, from the start of their processes to the end of the last, or to the first failure."""

    def __init__(self, ray: Any, plan: LaunchPlan, restart: int, received: ReceivedSignals) -> None:
        self._ray, self._plan, self._restart, self._received = ray, plan, restart, received
        cpus, use_gpu = cpus_of_a_worker(plan), uses_gpus(plan, ray.cluster_resources())
        count = plan.nproc * plan.num_machines
        self._needs = {"num_cpus": cpus, "num_gpus": 1 if use_gpu else 0}
        bundle = {"CPU": cpus, **({"GPU": 1} if use_gpu else {})}
        self._group = ray.util.placement_group([dict(bundle) for _ in range(count)], strategy="PACK")
        self._actors: list[Any] = []

    def run(self) -> list[RayEnded]:
        """Return how the ranks ended that have not been ended from here."""
        try:
            ready = self._group.ready()
            while not self._ray.wait([ready], timeout=POLL_S)[0]:
                if self._received.first is not None:
                    return []
            return self._follow(self._started())
        finally:
            # With an actor ends what it has started.
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._group)

    def _started(self) -> dict[Any, int]:
        """Return the rank of each call of ``run``."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        make = self._ray.remote(max_concurrency=2, **self._needs)(RankProcess)
        self._actors = [
            make.options(scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number)).remote()
            for number in range(len(self._group.bundle_specs))
        ]
        places = self._ray.get([actor.place.remote() for actor in self._actors])
        order, variables = variables_of_ranks(places, self._restart)
        self._actors = [self._actors[number] for number in order]
        host, port = self._ray.get(self._actors[0].host_store.remote())
        master = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        job = job_of(self._plan)
        return {
            actor.run.remote(job, rank, {**variables[rank], **master}): rank
            for rank, actor in enumerate(self._actors)
        }

    def _follow(self, running: dict[Any, int]) -> list[RayEnded]:
        ended: list[RayEnded] = []
        limit, is_asked = float("inf"), False
        while running and not self._received.end and time.monotonic() < limit:
            for call in self._ray.wait(list(running), timeout=POLL_S)[0]:
                ended.append(self._result(call, running.pop(call)))
                if _has_failed(ended[-1]) and self._received.stop is None:
                    limit = min(limit, time.monotonic() + CAUSE_WAIT_S)
            if self._received.stop is not None and not is_asked:
                # One rank is asked to stop: it agrees with the others on where.
                is_asked, limit = True, time.monotonic() + self._plan.fault_policy.grace_s
                self._ray.get(self._actors[0].stop.remote())
        return ended

    def _result(self, call: Any, rank: int) -> RayEnded:
        try:
            ended: RayEnded = self._ray.get(call)
        except Exception as error:
            # Ray has lost the actor, or its machine.
            return RayEnded(rank, 1, {"message": {"message": str(error) or type(error).__name__}})
        return ended


if not TYPE_CHECKING:
    __getattr__ = names_of_modules(__name__, {"worker": ["RayPlacement"]})
