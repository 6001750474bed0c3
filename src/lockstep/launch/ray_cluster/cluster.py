"""Joining a Ray cluster, or starting one on this machine that nobody else can reach."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lockstep.config.settings import THREADS_VARIABLE
from lockstep.config.sources import export_environment, inherited_environment
from lockstep.control.secret import new_secret
from lockstep.errors import ConfigError, MissingExtraError
from lockstep.launch.network import LOOPBACK, loopback_interface
from lockstep.launch.plan import LaunchPlan, available_cores

LOCAL = "local"
SESSION_LOGS = "/tmp/ray/session_latest/logs"


def address(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """Return the address: ``local`` for a cluster of our own, else where there is one: RAY_ADDRESS, or ``auto``, Ray's
    own search."""
    given = environ.get("RAY_ADDRESS")
    return given or (LOCAL if plan.num_machines == 1 else "auto")


def ray_environment(plan: LaunchPlan, environ: Mapping[str, str], token: str) -> dict[str, str]:
    """Return what Ray reads from the environment, before it is imported. ``token``: for a cluster of our own."""
    # Every line of every rank.
    values = {"RAY_DEDUP_LOGS": "0"}
    if address(plan, environ) == LOCAL:
        values |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_USAGE_STATS_ENABLED": "0",
            # Off on every system: then this machine's address is the loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        interface = loopback_interface()
        if interface is not None and not environ.get("GLOO_SOCKET_IFNAME"):
            # The ranks inherit it.
            values["GLOO_SOCKET_IFNAME"] = interface
        if "CUDA_VISIBLE_DEVICES" in plan.environment:
            values["CUDA_VISIBLE_DEVICES"] = plan.environment["CUDA_VISIBLE_DEVICES"]
    return values


def connect(plan: LaunchPlan) -> Any:
    """Import Ray, start or join a cluster, and return the package.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: there is no cluster to join, or it does not let us in.
    """
    environ = inherited_environment()
    where = address(plan, environ)
    export_environment(ray_environment(plan, environ, new_secret().hex()))
    try:
        import ray
    except ImportError:
        raise MissingExtraError("--ray", "ray", "ray") from None
    quiet = {"logging_level": logging.ERROR}
    own = {
        "include_dashboard": False,
        "_node_ip_address": LOOPBACK,
        "num_cpus": max(available_cores(), plan.nproc * cpus_of_a_worker(plan)),
    }
    try:
        ray.init(address=where, **quiet, **(own if where == LOCAL else {}))
    except Exception as error:
        # Ray has no exception of its own for this.
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        if where == LOCAL:
            raise ConfigError(
                f"Ray cannot start on this machine: {first} Read the logs in {SESSION_LOGS}, or launch without "
                "--ray."
            ) from None
        raise ConfigError(
            f"cannot join the Ray cluster at {where}: {first} Start one with `ray start --head`, set RAY_ADDRESS "
            "to that of yours, or leave out --nnodes to start a cluster on this machine."
        ) from None
    return ray


def cpus_of_a_worker(plan: LaunchPlan) -> int:
    """Cores that Ray sets aside for each process, and from which it derives OMP_NUM_THREADS."""
    given = plan.environment.get(THREADS_VARIABLE)
    if given is not None:
        return int(given)
    return max(1, available_cores() // plan.nproc) if plan.num_machines == 1 else 1


def uses_gpus(plan: LaunchPlan, resources: Mapping[str, float]) -> bool:
    """Return what was said, or whether the cluster has GPUs."""
    use_cpu = plan.settings["use_cpu"].value if "use_cpu" in plan.settings else None
    return resources.get("GPU", 0) > 0 if use_cpu is None else not use_cpu


def shortage(plan: LaunchPlan, resources: Mapping[str, float], use_gpu: bool) -> str | None:
    """Return what the cluster lacks at the moment, as a sentence."""
    processes = plan.nproc * plan.num_machines
    needed = {"CPU": processes * cpus_of_a_worker(plan)} | ({"GPU": processes} if use_gpu else {})
    for kind, count in needed.items():
        if resources.get(kind, 0) < count:
            return f"the Ray cluster has {resources.get(kind, 0):g} {kind}s and the run needs {count}"
    return None
