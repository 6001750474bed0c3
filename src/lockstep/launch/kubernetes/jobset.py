"""The manifest: a JobSet of one indexed Job, and through it a headless service in which the pods find each other."""

from __future__ import annotations

from lockstep.launch.kubernetes import pod
from lockstep.launch.kubernetes.options import KubernetesOptions, check_length
from lockstep.launch.kubernetes.pod import CONTAINER, KubernetesObject
from lockstep.launch.plan import LaunchPlan
from lockstep.runtime.failure import PREEMPTED

# The end that the Job controller gives the name of a pod.
RANDOM = "-xxxxx"


def jobset(plan: LaunchPlan, options: KubernetesOptions, forwarded: dict[str, str]) -> KubernetesObject:
    """Return the JobSet of a plan. ``forwarded``: further variables of its containers."""
    check_length(options.name, f"-{CONTAINER}-0-{plan.num_machines - 1}{RANDOM}")
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pod.metadata(options),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {
                    "name": CONTAINER,
                    "replicas": 1,
                    "template": {"spec": _indexed_job(plan, options, forwarded)},
                }
            ],
        },
    }


def _indexed_job(plan: LaunchPlan, options: KubernetesOptions, forwarded: dict[str, str]) -> KubernetesObject:
    """Return the spec of a batch/v1 Job with one pod for each machine, each with its number.

    A pod whose ranks saved their state at a stop (exit code 75), and one that the cluster took away, is
    replaced and does not count. Others count to ``backoffLimit``.
    """
    host = f"{options.name}-{CONTAINER}-0-0.{options.name}"
    saved = {"containerName": CONTAINER, "operator": "In", "values": [PREEMPTED]}
    job: KubernetesObject = {
        "parallelism": plan.num_machines,
        "completions": plan.num_machines,
        "completionMode": "Indexed",
        # A launcher that gives up takes those of the other machines with it.
        "backoffLimit": plan.fault_policy.max_restarts * plan.num_machines,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onExitCodes": saved},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "metadata": {"labels": pod.labels(options)},
            "spec": pod.pod_spec(plan, options, host, forwarded),
        },
    }
    # Machines that came too late have nobody to meet.
    if plan.elastic:
        job["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return job
