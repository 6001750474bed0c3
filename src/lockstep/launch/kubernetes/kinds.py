"""The three kinds of resource, each a function (plan, options, forwarded environment) -> manifests."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.errors import ConfigError
from lockstep.launch.kubernetes import pod
from lockstep.launch.kubernetes.options import KubernetesOptions, check_length
from lockstep.launch.kubernetes.pod import KubernetesObject, PodMachine
from lockstep.launch.plan import LaunchPlan

# Kubeflow Trainer wants this name for the job and its container; JobSet takes any.
JOB = "node"
# Set by the Job controller.
INDEX = "$(JOB_COMPLETION_INDEX)"
# Set by the training operator: master 0, then the workers.
PYTORCH_INDEX = "$(PET_NODE_RANK)"
PYTORCH_CONTAINER = "pytorch"
# The end that the Job controller gives the name of a pod.
RANDOM = "-xxxxx"
TRAINER_ARGUMENTS = 128
# Kubeflow's v1 operator counts every restart, those after a stop too: six, as Kubernetes does by default
RESTARTS = 6


def jobset(plan: LaunchPlan, options: KubernetesOptions, forwarded: dict[str, str]) -> list[KubernetesObject]:
    """A JobSet of one indexed Job, and through it a headless service in which the pods find each other."""
    _refuse_runtime(options, "jobset")
    machine = _indexed_machine(plan, options)
    job = {"spec": pod.indexed_job(plan, options, machine, forwarded)}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": JOB, "replicas": 1, "template": job}],
    }
    return [_resource("jobset.x-k8s.io/v1alpha2", "JobSet", options, spec)]


def trainjob(
    plan: LaunchPlan, options: KubernetesOptions, forwarded: dict[str, str]
) -> list[KubernetesObject]:
    """A TrainJob, and the TrainingRuntime that it refers to unless ``runtime`` names one of the cluster.

    The pod, its restarts and its grace period are the runtime's part; a TrainJob has no fields for them.
    """
    pod.check_claim(options)
    machine = _indexed_machine(plan, options)
    arguments = pod.arguments(plan, machine)
    if len(arguments) > TRAINER_ARGUMENTS:
        raise ConfigError(
            f"the container of a TrainJob takes {TRAINER_ARGUMENTS} arguments, but there are {len(arguments)}. "
            "Put the arguments of the script into a file, or use --k8s jobset."
        )
    trainer: KubernetesObject = {
        "image": options.image,
        "command": list(pod.COMMAND),
        "args": arguments,
        "numNodes": plan.num_machines,
        "env": pod.environment(plan, options, forwarded),
        "resourcesPerNode": pod.resources(plan, options),
    }
    kind, name = "TrainingRuntime", options.name
    documents: list[KubernetesObject] = []
    if options.runtime is not None:
        kind, name = "ClusterTrainingRuntime", options.runtime
    else:
        documents.append(_training_runtime(plan, options, machine))
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": kind, "name": name},
        "trainer": {key: value for key, value in trainer.items() if value},
    }
    return [*documents, _resource("trainer.kubeflow.org/v1alpha1", "TrainJob", options, spec)]


def _training_runtime(plan: LaunchPlan, options: KubernetesOptions, machine: PodMachine) -> KubernetesObject:
    job = pod.indexed_job(plan, options, machine, {})
    (container,) = job["template"]["spec"]["containers"]
    for said_by_the_trainjob in ("command", "args", "env", "resources"):
        container.pop(said_by_the_trainjob, None)
    template = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": job,
    }
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    jobs = [{"name": JOB, "replicas": 1, "template": template}]
    spec = {
        "mlPolicy": {"numNodes": plan.num_machines},
        "template": {"spec": {"network": network, "replicatedJobs": jobs}},
    }
    return _resource("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", options, spec)


def pytorchjob(
    plan: LaunchPlan, options: KubernetesOptions, forwarded: dict[str, str]
) -> list[KubernetesObject]:
    """A PyTorchJob of Kubeflow's training operator v1: a master and workers, or, elastic, workers alone."""
    _refuse_runtime(options, "pytorchjob")
    check_length(options.name, f"-master-{plan.num_machines - 1}")
    first = "worker" if plan.elastic else "master"
    host = f"{options.name}-{first}-0"
    machine = PodMachine(PYTORCH_CONTAINER, host, None if plan.elastic else PYTORCH_INDEX)
    counts = {"Master": 1, "Worker": plan.num_machines - 1}
    if plan.elastic:
        counts = {"Worker": plan.num_machines}
    spec: KubernetesObject = {
        "nprocPerNode": str(plan.nproc),
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "backoffLimit": max(plan.fault_policy.max_restarts, RESTARTS) * plan.num_machines,
        },
        "pytorchReplicaSpecs": {
            name: {
                "replicas": count,
                "restartPolicy": "OnFailure",
                "template": _pytorch_template(plan, options, machine, forwarded),
            }
            for name, count in counts.items()
            if count
        },
    }
    if plan.elastic:
        spec["elasticPolicy"] = {
            "minReplicas": plan.min_machines,
            "maxReplicas": plan.num_machines,
            "maxRestarts": plan.fault_policy.max_restarts,
            "rdzvBackend": "c10d",
            "rdzvHost": host,
            "rdzvPort": plan.port or pod.PORT,
        }
    return [_resource("kubeflow.org/v1", "PyTorchJob", options, spec)]


def _pytorch_template(
    plan: LaunchPlan, options: KubernetesOptions, machine: PodMachine, forwarded: dict[str, str]
) -> KubernetesObject:
    spec = pod.pod_spec(plan, options, machine, forwarded)
    # The operator makes each pod's service for the port of this name.
    spec["containers"][0]["ports"] = [{"name": "pytorchjob-port", "containerPort": plan.port or pod.PORT}]
    return {"metadata": {"labels": pod.labels(options)}, "spec": spec}


def _resource(api: str, kind: str, options: KubernetesOptions, spec: KubernetesObject) -> KubernetesObject:
    return {"apiVersion": api, "kind": kind, "metadata": pod.metadata(options), "spec": spec}


def _indexed_machine(plan: LaunchPlan, options: KubernetesOptions) -> PodMachine:
    check_length(options.name, f"-{JOB}-0-{plan.num_machines - 1}{RANDOM}")
    host = f"{options.name}-{JOB}-0-0.{options.name}"
    return PodMachine(JOB, host, None if plan.elastic else INDEX)


def _refuse_runtime(options: KubernetesOptions, kind: str) -> None:
    if options.runtime is not None:
        raise ConfigError(
            f"--k8s-option runtime={options.runtime} is for TrainJobs, but this is a {kind}. Remove it."
        )


KINDS: dict[str, Callable[[LaunchPlan, KubernetesOptions, dict[str, str]], list[KubernetesObject]]] = {
    "trainjob": trainjob,
    "pytorchjob": pytorchjob,
    "jobset": jobset,
}
