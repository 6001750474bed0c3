"""The parts of the Kubernetes APIs that our manifests use, and a check as strict as the API server's.

Written down from the API references, not from our source: batch/v1 and core/v1 of Kubernetes 1.33, JobSet
0.12 (v1alpha2).
``!`` after a field: required. A set: the allowed words. A list: items of one type. ``Map``: keys are free.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

QUANTITY = re.compile(r"[+-]?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Map:
    """An object with free keys, all values of one type."""

    values: Any


@dataclass(frozen=True)
class Exactly:
    """One value."""

    value: str


class Quantity:
    """An amount such as 500m or 16Gi, or a number."""


NAMES = Map(str)
SECRET_REF = {"name": str, "key!": str, "optional": bool}
FIELD_REF = {"apiVersion": str, "fieldPath!": str}
ENV = {
    "name!": str,
    "value": str,
    "valueFrom": {"secretKeyRef": SECRET_REF, "configMapKeyRef": SECRET_REF, "fieldRef": FIELD_REF},
}
RESOURCES = {"requests": Map(Quantity), "limits": Map(Quantity)}
CONTAINER = {
    "name!": str,
    "image": str,
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "command": [str],
    "args": [str],
    "workingDir": str,
    "env": [ENV],
    "resources": RESOURCES,
    "ports": [{"name": str, "containerPort!": int, "protocol": {"TCP", "UDP", "SCTP"}}],
    "securityContext": {"allowPrivilegeEscalation": bool, "runAsNonRoot": bool, "privileged": bool},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool, "subPath": str}],
}
VOLUME = {
    "name!": str,
    "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": Quantity},
    "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
}
POD = {
    "containers!": [CONTAINER],
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "terminationGracePeriodSeconds": int,
    "automountServiceAccountToken": bool,
    "serviceAccountName": str,
    "nodeSelector": NAMES,
    "subdomain": str,
    "volumes": [VOLUME],
}
METADATA = {"name": str, "namespace": str, "labels": NAMES, "annotations": NAMES}
POD_TEMPLATE = {"metadata": METADATA, "spec": POD}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": {"NonIndexed", "Indexed"},
    "backoffLimit": int,
    "backoffLimitPerIndex": int,
    "activeDeadlineSeconds": int,
    "ttlSecondsAfterFinished": int,
    "podReplacementPolicy": {"TerminatingOrFailed", "Failed"},
    "podFailurePolicy": {
        "rules!": [
            {
                "action!": {"FailJob", "FailIndex", "Ignore", "Count"},
                "onExitCodes": {"containerName": str, "operator!": {"In", "NotIn"}, "values!": [int]},
                "onPodConditions": [{"type!": str, "status": {"True", "False", "Unknown"}}],
            }
        ]
    },
    "successPolicy": {"rules!": [{"succeededIndexes": str, "succeededCount": int}]},
    "template!": POD_TEMPLATE,
}
JOBSET_SPEC = {
    "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
    "failurePolicy": {"maxRestarts": int, "restartStrategy": {"Recreate", "BlockingRecreate"}},
    "successPolicy": {"operator!": {"All", "Any"}, "targetReplicatedJobs": [str]},
    "replicatedJobs": [
        {
            "name!": str,
            "replicas": int,
            "groupName": str,
            "template!": {"metadata": METADATA, "spec": JOB},
        }
    ],
    "suspend": bool,
    "ttlSecondsAfterFinished": int,
}
JOBSET = {
    "apiVersion!": Exactly("jobset.x-k8s.io/v1alpha2"),
    "kind!": Exactly("JobSet"),
    "metadata!": METADATA,
    "spec!": JOBSET_SPEC,
}


def problems(value: Any, kind: Any, where: str = "") -> list[str]:
    """What the API server would refuse: unknown and missing fields, wrong types, words that are not allowed."""
    if isinstance(kind, dict):
        return _fields(value, kind, where)
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{where}: not a list"]
        return [text for i, item in enumerate(value) for text in problems(item, kind[0], f"{where}[{i}]")]
    if isinstance(kind, Map):
        if not isinstance(value, dict):
            return [f"{where}: not an object"]
        return [text for key, item in value.items() for text in problems(item, kind.values, f"{where}.{key}")]
    if isinstance(kind, set):
        return [] if value in kind else [f"{where}: {value!r} is not one of {sorted(kind)}"]
    if isinstance(kind, Exactly):
        return [] if value == kind.value else [f"{where}: {value!r} is not {kind.value}"]
    if kind is Quantity:
        fits = type(value) is int or (type(value) is str and QUANTITY.fullmatch(value))
        return [] if fits else [f"{where}: {value!r} is not a quantity"]
    return [] if type(value) is kind else [f"{where}: {value!r} is not a {kind.__name__}"]


def _fields(value: Any, fields: dict[str, Any], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: not an object"]
    types = {name.rstrip("!"): kind for name, kind in fields.items()}
    found = [f"{where}.{name[:-1]}: missing" for name in fields if name[-1] == "!" and name[:-1] not in value]
    found += [f"{where}.{name}: unknown field" for name in value if name not in types]
    for name, item in value.items():
        if name in types:
            found += problems(item, types[name], f"{where}.{name}")
    return found
