"""What every machine of the job is, whatever resource starts it: one pod with one container.

The container runs the ordinary ``lockstep launch`` as one machine of several, as an argument list.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from lockstep.config.files import JsonObject
from lockstep.config.settings import DECLARED, THREADS_VARIABLE
from lockstep.config.sources import SECRET_VARIABLE
from lockstep.config.values import RENDEZVOUS_KEYS, USUAL_PORT
from lockstep.errors import ConfigError
from lockstep.launch.kubernetes.options import KubernetesOptions
from lockstep.launch.plan import FaultPolicy, LaunchPlan
from lockstep.runtime.failure import PREEMPTED

PORT = USUAL_PORT
COMMAND = ("lockstep", "launch")
# After the launcher's own limit, before the kubelet's SIGKILL: the launcher ends its workers and says why.
MARGIN_S = 10
SHARED_MEMORY = "shared-memory"
CHECKPOINTS = "claim"
SECRET_KEY = "secret"
KubernetesObject = JsonObject


@dataclass(frozen=True)
class PodMachine:
    """The container of one machine: its name, where the machines meet, and which of them it is.

    ``rank`` is a number, or ``$(NAME)`` for a variable that the controller sets; None: ranks by arrival.
    """

    container: str
    meeting_host: str
    rank: str | None = None


def arguments(plan: LaunchPlan, machine: PodMachine) -> list[str]:
    """What follows ``COMMAND``, for the kubelet, which expands ``$(NAME)`` and nothing else."""
    fault_policy = plan.fault_policy
    words = _flag_with_value("nproc", plan.nproc)
    if plan.num_machines > 1:
        nodes = f"{plan.min_machines}:{plan.num_machines}" if plan.elastic else str(plan.num_machines)
        words += _flag_with_value("num_machines", nodes)
        words += _flag_with_value("rdzv", f"{machine.meeting_host}:{plan.port or PORT}")
        if machine.rank is not None:
            words += _flag_with_value("machine_rank", machine.rank)
    words += _flag_with_value("max_restarts", fault_policy.max_restarts)
    words += _flag_with_value("grace", _seconds(fault_policy.grace_s))
    words += _flag_with_value("hang_timeout", _seconds(fault_policy.hang_timeout_s))
    words += [] if fault_policy.watch else [DECLARED["watch"].off_flag]
    usual = FaultPolicy()
    if fault_policy.monitor_interval_s != usual.monitor_interval_s:
        words += _flag_with_value("monitor_interval", _seconds(fault_policy.monitor_interval_s))
    waits, usual_waits = (
        (one.join_timeout_s, one.last_call_s, one.heartbeat_limit_s) for one in (fault_policy, usual)
    )
    if waits != usual_waits:
        texts = [f"{key}={_seconds(wait)}" for key, wait in zip(RENDEZVOUS_KEYS, waits, strict=True)]
        words += _flag_with_value("rdzv_conf", ",".join(texts))
    if plan.role != LaunchPlan.role:
        words += _flag_with_value("role", plan.role)
    if plan.interface is not None:
        words += _flag_with_value("interface", plan.interface)
    if plan.log_dir is not None:
        words += _flag_with_value("log_dir", plan.log_dir) + ([DECLARED["tee"].flag] if plan.tee else [])
    return words + [escaped(word) for word in program(plan)]


def _flag_with_value(setting: str, value: object) -> list[str]:
    return [DECLARED[setting].flag, str(value)]


def _seconds(value: float) -> str:
    return f"{value:.17g}"


def program(plan: LaunchPlan) -> list[str]:
    """The script with its arguments, as ``lockstep launch`` takes them; the interpreter is the image's."""
    if plan.command[0] != sys.executable:
        return [DECLARED["no_python"].flag, *plan.command]
    return list(plan.command[1:])


def escaped(word: str) -> str:
    """A word that the kubelet leaves as it is: it makes one ``$`` of two."""
    return word.replace("$", "$$")


def environment(
    plan: LaunchPlan, options: KubernetesOptions, forwarded: dict[str, str]
) -> list[KubernetesObject]:
    """The variables of the container: what was said of the run, and its secret by reference."""
    values = {**forwarded, **plan.environment}
    if THREADS_VARIABLE not in values and options.cpu is not None:
        cores = int(options.cpu[:-1]) / 1000 if options.cpu.endswith("m") else float(options.cpu)
        values[THREADS_VARIABLE] = str(max(1, int(cores) // plan.nproc))
    entries: list[KubernetesObject] = [
        {"name": name, "value": escaped(value)} for name, value in sorted(values.items())
    ]
    if plan.num_machines > 1:
        reference = {"name": options.secret_name, "key": SECRET_KEY}
        entries.append({"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": reference}})
    return entries


def resources(plan: LaunchPlan, options: KubernetesOptions) -> KubernetesObject:
    """Requests and limits of a machine; without ``gpus``, one GPU for each process unless it runs on CPUs."""
    gpus = options.gpus
    if gpus is None:
        use_cpu = plan.settings["use_cpu"].value if "use_cpu" in plan.settings else None
        gpus = 0 if use_cpu else plan.nproc
    amounts = {
        "cpu": options.cpu,
        "memory": options.memory,
        options.gpu_resource: str(gpus) if gpus else None,
    }
    given = {name: amount for name, amount in amounts.items() if amount is not None}
    return {"requests": given, "limits": dict(given)} if given else {}


def pod_spec(
    plan: LaunchPlan,
    options: KubernetesOptions,
    machine: PodMachine,
    forwarded: dict[str, str],
    restart: str | None = None,
) -> KubernetesObject:
    """The pod of a machine. ``restart``: its restartPolicy, where the pod says it and not the job."""
    # Data-loader workers pass batches through /dev/shm, of which a container has 64 MB otherwise.
    volumes: list[KubernetesObject] = [{"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]
    mounts: list[KubernetesObject] = [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}]
    if options.claim is not None:
        volumes.append({"name": CHECKPOINTS, "persistentVolumeClaim": {"claimName": options.claim.name}})
        mounts.append({"name": CHECKPOINTS, "mountPath": options.claim.path})
    container: KubernetesObject = {
        "name": machine.container,
        "image": options.image,
        "command": list(COMMAND),
        "args": arguments(plan, machine),
        "env": environment(plan, options, forwarded),
        "resources": resources(plan, options),
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": mounts,
    }
    spec: KubernetesObject = {
        # Training does not talk to the API server.
        "automountServiceAccountToken": False,
        "containers": [{key: value for key, value in container.items() if value}],
        "terminationGracePeriodSeconds": math.ceil(plan.fault_policy.grace_s) + MARGIN_S,
        "volumes": volumes,
    }
    if restart is not None:
        spec["restartPolicy"] = restart
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    return spec


def metadata(options: KubernetesOptions) -> KubernetesObject:
    """Name, namespace and labels of an object."""
    found: KubernetesObject = {"name": options.name, "labels": labels(options)}
    if options.namespace is not None:
        found["namespace"] = options.namespace
    return found


def labels(options: KubernetesOptions) -> dict[str, str]:
    """The labels by which ``kubectl get pods -l`` finds what belongs together."""
    return {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": options.name}


def indexed_job(
    plan: LaunchPlan, options: KubernetesOptions, machine: PodMachine, forwarded: dict[str, str]
) -> KubernetesObject:
    """The spec of a batch/v1 Job with one pod for each machine, each with its number.

    A pod whose ranks saved their state at a stop (exit code 75), and one that the cluster took away, is
    replaced and does not count. Others count to ``backoffLimit``.
    """
    job: KubernetesObject = {
        "parallelism": plan.num_machines,
        "completions": plan.num_machines,
        "completionMode": "Indexed",
        # A launcher that gives up takes those of the other machines with it.
        "backoffLimit": plan.fault_policy.max_restarts * plan.num_machines,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onExitCodes": {
                        "containerName": machine.container,
                        "operator": "In",
                        "values": [PREEMPTED],
                    },
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "metadata": {"labels": labels(options)},
            "spec": pod_spec(plan, options, machine, forwarded, restart="Never"),
        },
    }
    # Machines that came too late have nobody to meet.
    if plan.elastic:
        job["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return job


def check_claim(options: KubernetesOptions) -> None:
    """Raise ConfigError when a volume is asked for that only the cluster's own runtime could have."""
    if options.runtime is not None and options.claim is not None:
        raise ConfigError(
            f"--k8s-option claim={options.claim.name} adds a volume to the pods, but the runtime "
            f"{options.runtime} describes the pods. Put the volume into that runtime, or remove runtime."
        )
