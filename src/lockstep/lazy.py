"""Names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of ``package``.

    Args:
        package: The ``__name__`` of the package.
        modules: Name -> the module that defines it; ``module:other`` where it is called ``other`` there.
    """

    def resolve(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, other = modules[name].partition(":")
        value = getattr(import_module(module), other or name)
        setattr(sys.modules[package], name, value)
        return value

    return resolve


def names_of_modules(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of ``package``: what is imported from it by those who need not know its files.

    The library itself imports from the file, so that each module loads what it needs and no more. For mypy a
    ``__getattr__`` makes any name exist: declare it where ``TYPE_CHECKING`` is false.

    Args:
        package: The ``__name__`` of the package.
        modules: A module below it -> the names that it defines. None of them is also the name of a module.
    """
    return lazy_names(
        package, {name: f"{package}.{module}" for module, names in modules.items() for name in names}
    )
