"""What every machine of the job is, whatever resource starts it: one pod with one container.

The container runs the ordinary ``lockstep launch`` as one machine of several, as an argument list.
"""

from __future__ import annotations

import math
import sys

from lockstep.config.files import JsonObject
from lockstep.config.settings import DECLARED, THREADS_VARIABLE
from lockstep.config.sources import SECRET_VARIABLE
from lockstep.config.values import RENDEZVOUS_KEYS, USUAL_PORT
from lockstep.launch.kubernetes.options import KubernetesOptions
from lockstep.launch.plan import FaultPolicy, LaunchPlan

PORT = USUAL_PORT
COMMAND = ("lockstep", "launch")
CONTAINER = "node"
# Set by the Job controller.
INDEX = "$(JOB_COMPLETION_INDEX)"
# After the launcher's own limit, before the kubelet's SIGKILL: the launcher ends its workers and says why.
MARGIN_S = 10
SHARED_MEMORY = "shared-memory"
CHECKPOINTS = "claim"
SECRET_KEY = "secret"
KubernetesObject = JsonObject


def arguments(plan: LaunchPlan, meeting_host: str) -> list[str]:
    """Return what follows ``COMMAND``, for the kubelet, which expands ``$(NAME)`` and nothing else."""
    fault_policy = plan.fault_policy
    words = _flag_with_value("nproc", plan.nproc)
    if plan.num_machines > 1:
        nodes = f"{plan.min_machines}:{plan.num_machines}" if plan.elastic else str(plan.num_machines)
        words += _flag_with_value("num_machines", nodes)
        words += _flag_with_value("rdzv", f"{meeting_host}:{plan.port or PORT}")
        # The machines of an elastic launch are numbered as they arrive.
        if not plan.elastic:
            words += _flag_with_value("machine_rank", INDEX)
    words += _flag_with_value("max_restarts", fault_policy.max_restarts)
    words += _flag_with_value("grace", _seconds(fault_policy.grace_s))
    words += _flag_with_value("hang_timeout", _seconds(fault_policy.hang_timeout_s))
    words += [] if fault_policy.watch else [DECLARED["watch"].off_flag]
    words += [DECLARED["warm_restarts"].flag] if fault_policy.warm_restarts else []
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
    """Return the script with its arguments, as ``lockstep launch`` takes them; the interpreter is the image's."""
    if plan.command[0] != sys.executable:
        return [DECLARED["no_python"].flag, *plan.command]
    return list(plan.command[1:])


def escaped(word: str) -> str:
    """Return a word that the kubelet leaves as it is: it makes one ``$`` of two."""
    return word.replace("$", "$$")


def environment(
    plan: LaunchPlan, options: KubernetesOptions, forwarded: dict[str, str]
) -> list[KubernetesObject]:
    """Return the variables of the container: what was said of the run, and its secret by reference."""
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
    """Return requests and limits of a machine; without ``gpus``, one GPU for each process unless it runs on CPUs."""
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
    plan: LaunchPlan, options: KubernetesOptions, meeting_host: str, forwarded: dict[str, str]
) -> KubernetesObject:
    """Return the pod of a machine; ``meeting_host``: where the machines meet."""
    # Data-loader workers pass batches through /dev/shm, of which a container has 64 MB otherwise.
    volumes: list[KubernetesObject] = [{"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]
    mounts: list[KubernetesObject] = [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}]
    if options.claim is not None:
        volumes.append({"name": CHECKPOINTS, "persistentVolumeClaim": {"claimName": options.claim.name}})
        mounts.append({"name": CHECKPOINTS, "mountPath": options.claim.path})
    container: KubernetesObject = {
        "name": CONTAINER,
        "image": options.image,
        "command": list(COMMAND),
        "args": arguments(plan, meeting_host),
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
        # A podFailurePolicy needs it.
        "restartPolicy": "Never",
    }
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    return spec


def metadata(options: KubernetesOptions) -> KubernetesObject:
    """Return name, namespace and labels of an object."""
    found: KubernetesObject = {"name": options.name, "labels": labels(options)}
    if options.namespace is not None:
        found["namespace"] = options.namespace
    return found


def labels(options: KubernetesOptions) -> dict[str, str]:
    """Return the labels by which ``kubectl get pods -l`` finds what belongs together."""
    return {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": options.name}
