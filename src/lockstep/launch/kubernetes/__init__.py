"""Kubernetes: the launch as manifests for ``kubectl``, in YAML; nothing here talks to a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from lockstep.config.sources import inherited_environment
from lockstep.errors import ConfigError
from lockstep.launch.backend import Command, forwarded, is_secret
from lockstep.launch.console import say
from lockstep.launch.kubernetes.jobset import jobset
from lockstep.launch.kubernetes.options import KubernetesOptions, parse_options
from lockstep.launch.kubernetes.pod import SECRET_KEY, KubernetesObject, program
from lockstep.launch.plan import LaunchPlan
from lockstep.lazy import names_of_modules

MAKE_SECRET = "python3 -c 'import secrets; print(secrets.token_hex(32))'"


def commands(plan: LaunchPlan) -> list[Command]:
    """Return what is to be run with the manifests, which are its standard input."""
    return [Command(("kubectl", "create", "-f", "-"), title="any machine", stdin=manifests(plan))]


def launch(plan: LaunchPlan) -> int:
    """Write the manifests to the plan's file, or to standard output; 0.

    Raises:
        ConfigError: an option is unknown or breaks a rule of Kubernetes, or the file cannot be written.
    """
    text = manifests(plan)
    path = plan.transport.output
    if path is None:
        raise ConfigError(
            "--k8s writes manifests and starts nothing. Add --dry-run to print them, or -o FILE to write them."
        )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"-o {path}: cannot be written: {reason}. Name another file.") from None
    say(f"lockstep: wrote {path}. Next: kubectl create -f {path}")
    return 0


def manifests(plan: LaunchPlan) -> str:
    """YAML of the resources, with the next step for people in its comments.

    Raises:
        ConfigError: an option is unknown or breaks a rule of Kubernetes.
    """
    _check(plan)
    options = parse_options(plan.transport.options, _script(plan))
    document = jobset(plan, options, _named(plan))
    return "".join(f"# {line}\n" for line in _comments(plan, options)) + as_yaml(document)


def _check(plan: LaunchPlan) -> None:
    """Raise ConfigError when something of this machine is said that the pods could not have."""
    if plan.address is not None:
        raise ConfigError(
            f"main_process_ip is {plan.address}, but pods meet at the first pod, whose name follows from the "
            "name of the job. Remove main_process_ip."
        )
    if plan.secret_file is not None:
        raise ConfigError(
            f"secret_file is {plan.secret_file}, a file of this machine, which pods cannot read. Remove it: the "
            "first lines of the manifests make a Secret of Kubernetes, from which the pods read it."
        )


def _named(plan: LaunchPlan) -> dict[str, str]:
    """Return the variables that ``--forward-env`` names; nothing else of this machine concerns a container."""
    environ = inherited_environment()
    for name in plan.transport.forward_env:
        if is_secret(name):
            raise ConfigError(
                f"forward_env names {name}, whose value would be readable in the manifest. Remove it, and pass "
                "it to the containers by a Secret of Kubernetes."
            )
    known = {name: environ[name] for name in plan.transport.forward_env if name in environ}
    return forwarded(known, plan.transport.forward_env)


def _script(plan: LaunchPlan) -> str:
    words = program(plan)
    return words[1] if words[0] in ("-m", "--no-python") else words[0]


def _comments(plan: LaunchPlan, options: KubernetesOptions) -> list[str]:
    machines = f"{plan.min_machines} to {plan.num_machines}" if plan.elastic else f"{plan.num_machines}"
    lines = [f"{plan.transport.kind} {options.name}: {plan.nproc} processes on each of {machines} machines."]
    if plan.num_machines > 1:
        namespace = [] if options.namespace is None else ["--namespace", options.namespace]
        create = ["kubectl", "create", "secret", "generic", options.secret_name, *namespace]
        lines += [
            "The run's secret is made once, through a pipe, so that it is in no file and no argument:",
            f"  {MAKE_SECRET} | {' '.join(create)} --from-file={SECRET_KEY}=/dev/stdin",
        ]
    return lines


# Words that are text for any reader of YAML. To Go's, which Kubernetes has, 1e-3 and 0o7 are numbers
# and y is true, where Python's writes all of them without quotes.
PLAIN = re.compile(r"(?!(?:[yYnN]|[oO][nN])$)[A-Za-z/$][\w./$(){}:@-]*|--[a-z][\w-]*", re.ASCII)


class _Dumper(yaml.SafeDumper):
    """Block style; text in quotes unless no reader could take it for something else."""

    def ignore_aliases(self, _data: object) -> bool:
        # An anchor in place of a repeated part would puzzle people.
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = None if PLAIN.fullmatch(value) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(document: KubernetesObject) -> str:
    """Return the text of a document."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1000)


if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "options": ["job_name_of"],
        },
    )
