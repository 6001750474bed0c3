"""Names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``.

    Args:
        package: The ``__name__`` of the package.
        homes: Name -> the module that defines it; ``module:other`` where it is called ``other`` there.
    """

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, other = homes[name].partition(":")
        value = getattr(import_module(module), other or name)
        setattr(sys.modules[package], name, value)
        return value

    return resolve
