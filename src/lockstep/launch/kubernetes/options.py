"""The values of ``--k8s-option KEY=VALUE``, held to the rules that the Kubernetes API has for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from lockstep.config.values import repr_short, suggestion
from lockstep.errors import ConfigError

MAX_LABEL = 63
MAX_SUBDOMAIN = 253
# RFC 1123.
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
IMAGE = (
    r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:\d{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:\w[\w.-]{0,127})?(@[A-Za-z][\w.+-]*:[0-9A-Fa-f]{32,})?"
)


class TextRule(NamedTuple):
    """What a value must be: a pattern, the most characters, and the same in words."""

    pattern: str
    most: int
    what: str

    def checked(self, key: str, value: str) -> str:
        """Return ``value``. Raises ConfigError if it breaks the rule."""
        if len(value) > self.most or not re.fullmatch(self.pattern, value, re.ASCII):
            raise _refused(key, value, self.what)
        return value


SUBDOMAIN = TextRule(
    rf"{LABEL}(\.{LABEL})*",
    MAX_SUBDOMAIN,
    f"a name: lower-case letters, digits, '-' and '.' between, at most {MAX_SUBDOMAIN}",
)
RULES = {
    "image": TextRule(IMAGE, 500, "the name of an image, such as ghcr.io/me/train:1"),
    # That of a service too (RFC 1035): no digit in front.
    "name": TextRule(
        r"[a-z]([-a-z0-9]*[a-z0-9])?",
        MAX_LABEL,
        f"a name: lower-case letters, digits and '-', a letter first, at most {MAX_LABEL}",
    ),
    "namespace": TextRule(
        LABEL, MAX_LABEL, f"a name: lower-case letters, digits and '-' between, at most {MAX_LABEL}"
    ),
    "cpu": TextRule(
        r"(?=.*[1-9])(\d{1,7}(\.\d{1,3})?|\d{1,10}m)", 11, "a quantity above 0, such as 4 or 500m"
    ),
    "memory": TextRule(
        r"(?=.*[1-9])\d{1,18}(\.\d{1,3})?([kMGTPE]|[KMGTPE]i)?",
        24,
        "a quantity above 0, such as 16Gi or 500M",
    ),
    "gpus": TextRule(r"\d{1,4}", 4, "a number of GPUs from 0 to 9999"),
    "gpu_resource": TextRule(
        r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?",
        MAX_SUBDOMAIN,
        "the name of a resource, such as amd.com/gpu",
    ),
    **dict.fromkeys(("secret", "service_account"), SUBDOMAIN),
}


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim, and where the container sees it."""

    name: str
    path: str


@dataclass(frozen=True)
class KubernetesOptions:
    """What the manifests need beside the launch plan. None: not said.

    ``cpu``, ``memory``, ``gpus`` are those of one machine. ``secret`` names the Secret with the run's secret.
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

    @property
    def secret_name(self) -> str:
        return self.secret or f"{self.name}-secret"


def parse_options(given: Mapping[str, str], script: str) -> KubernetesOptions:
    """Return the options of a launch; the name is by default that of the script.

    Raises:
        ConfigError: an option is unknown, the image is missing, or a value breaks a rule of Kubernetes.
    """
    known = [field.name for field in fields(KubernetesOptions)]
    for key in given:
        if key not in known:
            raise ConfigError(
                f"--k8s-option {key}: there is no such option.{suggestion(key, known)} Known: {', '.join(known)}."
            )
    if "image" not in given:
        raise ConfigError(
            "--k8s needs the container image with your script and Lockstep. Add --k8s-option image=REGISTRY/NAME:TAG."
        )
    complete = {"name": job_name_of(script), **given}
    plain = {key: RULES[key].checked(key, value) for key, value in complete.items() if key in RULES}
    claim = _claim(complete["claim"]) if "claim" in complete else None
    gpus = int(plain.pop("gpus")) if "gpus" in plain else None
    return KubernetesOptions(**plain, claim=claim, gpus=gpus)


def job_name_of(script: str) -> str:
    """Return a name for the job, from that of a script or module: ``my/Train_it.py`` gives ``train-it``."""
    stem = script.rstrip("/").rpartition("/")[2].removesuffix(".py").lower()
    words = re.findall(r"[a-z0-9]+", stem)
    return "-".join(words).lstrip("0123456789-")[:40].strip("-") or "train"


def check_length(name: str, suffix: str) -> None:
    """Raise ConfigError when a pod of the job could not have its name, which is its host name too."""
    longest = MAX_LABEL - len(suffix)
    if len(name) > longest:
        raise ConfigError(
            f"--k8s-option name={name} has {len(name)} characters, so pods would be called {name}{suffix}, but "
            f"Kubernetes allows {MAX_LABEL} characters. Choose a name of at most {longest}."
        )


def _refused(key: str, value: str, what: str) -> ConfigError:
    return ConfigError(f"--k8s-option {key}={repr_short(value)} is not {what}. Correct it.")


def _claim(value: str) -> Claim:
    name, _, path = value.partition(":")
    if not re.fullmatch(r"(/[^/:\0]+)+", path) or ".." in path.split("/"):
        raise _refused("claim", value, "CLAIM:PATH, such as checkpoints:/checkpoints with an absolute path")
    return Claim(SUBDOMAIN.checked("claim", name), path)
