"""The values of ``--k8s-option KEY=VALUE``, held to the rules that the Kubernetes API has for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lockstep.config.values import repr_short, suggestion
from lockstep.errors import ConfigError

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # RFC 1123
LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # names of services: no digit in front
MAX_LABEL = 63
MAX_SUBDOMAIN = 253
MAX_IMAGE = 500
IMAGE = re.compile(
    r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:\d{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:\w[\w.-]{0,127})?(@[A-Za-z][\w.+-]*:[0-9A-Fa-f]{32,})?",
    re.ASCII,
)
CPU = re.compile(r"\d{1,7}(\.\d{1,3})?|\d{1,10}m", re.ASCII)
MEMORY = re.compile(r"\d{1,18}(\.\d{1,3})?([kMGTPE]|[KMGTPE]i)?", re.ASCII)
COUNT = re.compile(r"\d{1,4}", re.ASCII)
RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim, and where the container sees it."""

    name: str
    path: str


@dataclass(frozen=True)
class KubernetesOptions:
    """What the manifests need beside the launch plan. None: not said.

    ``cpu``, ``memory``, ``gpus`` are those of one machine. ``secret`` names the Secret with the run's secret,
    ``runtime`` a ClusterTrainingRuntime of the cluster, for a TrainJob that is to use it.
    """

    image: str
    name: str
    namespace: str | None = None
    cpu: str | None = None
    memory: str | None = None
    gpus: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    secret: str | None = None
    claim: Claim | None = None
    service_account: str | None = None
    runtime: str | None = None

    @property
    def secret_name(self) -> str:
        return self.secret or f"{self.name}-secret"


def parse_options(said: Mapping[str, str], script: str) -> KubernetesOptions:
    """The options of a launch; the name is by default that of the script.

    Raises:
        ConfigError: an option is unknown, the image is missing, or a value breaks a rule of Kubernetes.
    """
    known = [field.name for field in fields(KubernetesOptions)]
    for key in said:
        if key not in known:
            raise ConfigError(
                f"--k8s-option {key}: there is no such option.{suggestion(key, known)} Known: {', '.join(known)}."
            )
    if "image" not in said:
        raise ConfigError(
            "--k8s needs the container image with your script and Lockstep. Add --k8s-option image=REGISTRY/NAME:TAG."
        )
    complete = {"name": job_name_of(script), **said}
    return KubernetesOptions(**{key: READERS[key](key, value) for key, value in complete.items()})


def job_name_of(script: str) -> str:
    """A name for the job, from that of a script or module: ``my/Train_it.py`` gives ``train-it``."""
    stem = script.rstrip("/").rpartition("/")[2].removesuffix(".py").lower()
    words = re.findall(r"[a-z0-9]+", stem)
    return "-".join(words).lstrip("0123456789-")[:40].strip("-") or "train"


def check_length(name: str, suffix: str) -> None:
    """Raise ConfigError when a pod of the job could not have its name, which is its host name too."""
    longest = MAX_LABEL - len(suffix)
    if len(name) > longest:
        raise ConfigError(
            f"--k8s-option name={name} has {len(name)} characters, and pods would be called {name}{suffix}, where "
            f"Kubernetes allows {MAX_LABEL}. Choose a name of at most {longest}."
        )


def _refuse(key: str, value: str, rule: str) -> ConfigError:
    return ConfigError(f"--k8s-option {key}={repr_short(value)} is not {rule}.")


def _image(key: str, value: str) -> str:
    if len(value) > MAX_IMAGE or not IMAGE.fullmatch(value):
        raise _refuse(key, value, "the name of an image, such as ghcr.io/me/train:1")
    return value


def _label_1035(key: str, value: str) -> str:
    if len(value) > MAX_LABEL or not LABEL_1035.fullmatch(value):
        raise _refuse(
            key, value, f"a name: lower-case letters, digits and '-', a letter first, at most {MAX_LABEL}"
        )
    return value


def _label(key: str, value: str) -> str:
    if len(value) > MAX_LABEL or not LABEL.fullmatch(value):
        raise _refuse(key, value, f"a name: lower-case letters, digits and '-' between, at most {MAX_LABEL}")
    return value


def _subdomain(key: str, value: str) -> str:
    if len(value) > MAX_SUBDOMAIN or not all(LABEL.fullmatch(part) for part in value.split(".")):
        raise _refuse(
            key, value, f"a name: lower-case letters, digits, '-' and '.' between, at most {MAX_SUBDOMAIN}"
        )
    return value


def _quantity(pattern: re.Pattern[str], examples: str) -> Callable[[str, str], str]:
    def read(key: str, value: str) -> str:
        if not pattern.fullmatch(value) or not re.search(r"[1-9]", value):
            raise _refuse(key, value, f"a quantity above 0, such as {examples}")
        return value

    return read


def _count(key: str, value: str) -> int:
    if not COUNT.fullmatch(value):
        raise _refuse(key, value, "a number of GPUs from 0 to 9999")
    return int(value)


def _resource(key: str, value: str) -> str:
    if len(value) > MAX_SUBDOMAIN or not RESOURCE.fullmatch(value):
        raise _refuse(key, value, "the name of a resource, such as amd.com/gpu")
    return value


def _claim(key: str, value: str) -> Claim:
    name, _, path = value.partition(":")
    if not re.fullmatch(r"(/[^/:\0]+)+", path) or ".." in path.split("/"):
        raise _refuse(key, value, "CLAIM:PATH, such as checkpoints:/checkpoints with an absolute path")
    return Claim(_subdomain(key, name), path)


READERS: dict[str, Callable[[str, str], Any]] = {
    "image": _image,
    "name": _label_1035,
    "namespace": _label,
    "cpu": _quantity(CPU, "4 or 500m"),
    "memory": _quantity(MEMORY, "16Gi or 500M"),
    "gpus": _count,
    "gpu_resource": _resource,
    "secret": _subdomain,
    "claim": _claim,
    "service_account": _subdomain,
    "runtime": _subdomain,
}
