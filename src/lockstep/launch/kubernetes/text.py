"""Manifests as YAML that Kubernetes reads as it was meant."""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from lockstep.launch.kubernetes.pod import Manifest

# Words that are text for any reader of YAML. To Go's, which Kubernetes has, 1e-3 and 0o7 are numbers
# and y is true, where Python's writes all of them without quotes.
PLAIN = re.compile(r"(?!(?:[yYnN]|[oO][nN])$)[A-Za-z/$][\w./$(){}:@-]*|--[a-z][\w-]*", re.ASCII)


class _Dumper(yaml.SafeDumper):
    """Block style; text in quotes unless no reader could take it for something else."""

    def ignore_aliases(self, _data: object) -> bool:
        return True  # an anchor in place of a repeated part would puzzle people


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = None if PLAIN.fullmatch(value) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(documents: Sequence[Manifest]) -> str:
    """The documents, one after the other."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1000)
