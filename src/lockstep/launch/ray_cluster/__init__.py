"""Ray: the plan's processes as workers of ``ray.train``'s TorchTrainer, on this machine or on a cluster.

Console, log files, signals and the words about a failure are those of every launch. Ray itself brings the output here,
and starts the ranks again after a failure, so that neither pipes of our own nor ``programs`` have a part in it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from signal import SIGTERM, Signals
from typing import Any

from lockstep.config.settings import SETTINGS
from lockstep.config.sources import SECRET_VARIABLE, inherited_environment
from lockstep.errors import ConfigError
from lockstep.launch.backend import SECRET, Command, forwarded, without_secrets
from lockstep.launch.console import Console, say
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
from lockstep.launch.ray_cluster.worker import Job, RayEnded, RayOutput, RunRecord, train_loop
from lockstep.launch.report import Failure, describe_failure, exit_code, first_failure
from lockstep.launch.signals import ReceivedSignals, received_by
from lockstep.runtime.failure import PREEMPTED, of_signal

POLL_S = 0.2
# From the order to end all processes to the end of this one, whatever Ray still does.
END_LIMIT_S = 5.0
# Each worker has its own; Ray gives it its GPUs.
OF_A_MACHINE = frozenset({"CUDA_VISIBLE_DEVICES", "PATH", "VIRTUAL_ENV", SECRET_VARIABLE})


def commands(plan: LaunchPlan) -> list[Command]:
    """What each of Ray's workers runs, and the environment in which this machine talks to Ray.

    Raises:
        ConfigError: the plan asks for something that Ray cannot do.
    """
    check(plan)
    environ = inherited_environment()
    where = address(plan, environ)
    cluster = "a cluster on this machine" if where == LOCAL else f"the cluster at {where}"
    processes = plan.nproc * plan.num_machines
    title = f"{processes} workers of ray.train on {cluster}, {cpus_of_a_worker(plan)} CPUs each"
    shown = without_secrets({**ray_environment(plan, environ, SECRET), **job_of(plan).environment})
    return [Command(plan.command, title=title, environment=shown)]


def launch(plan: LaunchPlan) -> int:
    """Run the plan on Ray and return the exit code: 0, or that of the process which failed first.

    Raises:
        ConfigError: the plan asks for something that Ray cannot do, or there is no cluster to join.
        MissingExtraError: Ray is not installed.
    """
    check(plan)
    with Console(plan.log_dir, plan.tee) as console:
        # Guarded, a cluster of our own is ended as a whole if this process is killed.
        return run_guarded(lambda *_: _connect_and_run(plan, console))


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
    """What each rank runs. The interpreter is that of Ray's worker there."""
    environ = inherited_environment()
    watching = {
        SETTINGS["watch"].variable: str(plan.fault_policy.watch).lower(),
        SETTINGS["grace"].variable: f"{plan.fault_policy.grace_s:.17g}",
    }
    values = {**forwarded(environ, plan.transport.forward_env), **watching, **plan.environment}
    environment = {name: value for name, value in values.items() if name not in OF_A_MACHINE}
    python = plan.command[0] == sys.executable
    return Job(plan.command[1:] if python else plan.command, python, os.getcwd(), environment)


def trainer_arguments(
    ray: Any, plan: LaunchPlan, record: object, use_gpu: bool, storage: str
) -> dict[str, object]:
    """The arguments of TorchTrainer beside the function."""
    from lockstep.launch.ray_cluster.meeting import NoGroupConfig

    scaling = ray.train.ScalingConfig(
        num_workers=plan.nproc * plan.num_machines,
        use_gpu=use_gpu,
        resources_per_worker={"CPU": cpus_of_a_worker(plan), **({"GPU": 1} if use_gpu else {})},
    )
    failure = ray.train.FailureConfig(max_failures=plan.fault_policy.max_restarts)
    return {
        "train_loop_config": {"record": record, "job": job_of(plan)},
        "torch_config": NoGroupConfig(),
        "scaling_config": scaling,
        "run_config": ray.train.RunConfig(name="lockstep", storage_path=storage, failure_config=failure),
    }


def _connect_and_run(plan: LaunchPlan, console: Console) -> int:
    ray = connect(plan)
    try:
        return _run(ray, plan, console)
    finally:
        ray.shutdown()


def _run(ray: Any, plan: LaunchPlan, console: Console) -> int:
    resources = ray.cluster_resources()
    use_gpu = uses_gpus(plan, resources)
    lack = shortage(plan, resources, use_gpu)
    if lack is not None:
        say(f"lockstep launch: {lack}; waiting for more.")
    record = ray.remote(num_cpus=0)(RunRecord).remote()
    # Not raised: Ray's calls swallow what a handler raises.
    received = ReceivedSignals()
    with tempfile.TemporaryDirectory(prefix="lockstep-ray-") as storage, received_by(received.add):
        trainer = ray.train.torch.TorchTrainer(
            train_loop, **trainer_arguments(ray, plan, record, use_gpu, storage)
        )
        fit = _Fit(trainer)
        fit.start()
        end = _follow(ray, record, fit, received, console, plan.fault_policy.grace_s)
        if end is not None:
            say(f"lockstep launch: ended by {end.name}; all processes were ended.")
            return of_signal(end)
        results = ray.get(record.results.remote())
        if received.stop is not None and {ended.exit_code for ended in results} == {of_signal(SIGTERM)}:
            # All ranks stopped; they have said where.
            return of_signal(received.stop)
        return _outcome(results, fit.error, plan, console)


class _Fit(threading.Thread):
    """``trainer.fit()`` beside the main thread, which has the signals. ``error``: what it raised."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(name="ray-fit", daemon=True)
        self._trainer = trainer
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._trainer.fit()
        except Exception as error:
            # The main thread says what it was.
            self.error = error


def _follow(
    ray: Any, record: Any, fit: _Fit, received: ReceivedSignals, console: Console, grace_s: float
) -> Signals | None:
    """Show the output and pass on stop signals until the run is over; returns the signal that ended it."""
    limit: float | None = None
    end: Signals | None = None
    while fit.is_alive():
        fit.join(POLL_S)
        _show(ray.get(record.take.remote()), console)
        if received.stop is not None and limit is None:
            begun = ray.get(record.request_stop.remote())
            limit = time.monotonic() + (grace_s if begun else 0)
        is_late = limit is not None and time.monotonic() >= limit
        end = received.end or (received.stop if is_late else None)
        if end is not None:
            ray.get(record.end.remote())
            fit.join(END_LIMIT_S)
            break
    _show(ray.get(record.take.remote()), console)
    return end or received.end


def _show(outputs: list[RayOutput], console: Console) -> None:
    for rank, stream, text in outputs:
        console.write(rank, stream, text)


def _outcome(results: list[RayEnded], error: Exception | None, plan: LaunchPlan, console: Console) -> int:
    """The exit code, after saying which rank failed first."""
    codes = {ended.exit_code for ended in results}
    if codes == {0} and error is None:
        return 0
    if PREEMPTED in codes and codes <= {0, PREEMPTED}:
        return PREEMPTED
    failures = [
        Failure(one.rank, one.exit_code, one.report, console.stderr_of(one.rank), one.ended_by_us)
        for one in results
        if one.exit_code
    ]
    if not failures:
        first = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        say(f"lockstep launch: Ray ended the run: {first[:500]}")
        return 1
    worst = first_failure(failures)
    say(describe_failure(worst, plan.nproc * plan.num_machines))
    return exit_code(worst)
