"""Which names of Accelerate there are here, and where. Nothing is imported to find out, least of all torch.

``import accelerate`` by alias (see ``alias``), what ``lockstep.utils`` finds beyond its own names, the tables in
``docs/migrating-from-accelerate.md`` and the tests of the interface all ask here. The names are in ``names``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import NamedTuple

from lockstep.compat.accelerate.names import NOT_OFFERED, OFFERED

VERSION = "1.15.0"
"""The version of Accelerate whose interface is offered."""

ROOT = "accelerate"

GATHERING = "accelerate.utils"
"""The module that has the names of all modules below it."""


class Offered(NamedTuple):
    """Where a name of Accelerate is here: ``attribute`` of ``module``."""

    module: str
    attribute: str

    def load(self) -> object:
        return getattr(import_module(self.module), self.attribute)


class NotOffered(NamedTuple):
    """Why a name of Accelerate is not here, and what to do instead."""

    reason: str

    def sentence(self, module: str, name: str) -> str:
        return f"{module}.{name} is not offered by Lockstep: {self.reason}"


IMPORTED_FROM = (
    GATHERING,
    "accelerate.state",
    "accelerate.data_loader",
    "accelerate.optimizer",
    "accelerate.scheduler",
    "accelerate.hooks",
    "accelerate.tracking",
    "accelerate.checkpointing",
    "accelerate.parallelism_config",
    "accelerate.logging",
    "accelerate.big_modeling",
    "accelerate.inference",
    "accelerate.accelerator",
    "accelerate.commands.config.config_args",
    "accelerate.commands.config.config_utils",
    "accelerate.commands.utils",
)
"""The modules of which Accelerate's other modules import names, so that scripts find these in both."""

Names = dict[str, Offered | NotOffered]


def _read() -> dict[str, Names]:
    found: dict[str, Names] = {}
    for module, of_module in OFFERED.items():
        names_in = found.setdefault(module, {})
        for source, text in of_module.items():
            for word in text.split():
                name, _, other = word.partition("=")
                names_in[name] = Offered(source, other or name)
    for reason, modules in NOT_OFFERED.items():
        for module, text in modules.items():
            found.setdefault(module, {}).update(dict.fromkeys(text.split(), NotOffered(reason)))
    gathered = found[GATHERING]
    for module, names_in in found.items():
        if module.startswith(f"{GATHERING}."):
            for name, known in names_in.items():
                gathered.setdefault(name, known)
    for module in list(found):
        package = module.rpartition(".")[0]
        while package:
            found.setdefault(package, {})
            package = package.rpartition(".")[0]
    return found


MODULES = _read()
"""Module of Accelerate -> its names."""


def find(module: str, name: str) -> Offered | NotOffered | None:
    """Return what is known of a name that is a module's own; None: nothing."""
    return MODULES.get(module, {}).get(name)


def find_imported(module: str, name: str) -> Offered | NotOffered | None:
    """Find a name as ``find`` does, and for modules that are no package also what they import from others."""
    known = find(module, name)
    if known is None and module not in (ROOT, GATHERING) and not name.startswith("_"):
        known = next((found for other in IMPORTED_FROM if (found := find(other, name))), None)
    return known


def names_in(module: str) -> Iterator[str]:
    """Return the names that a module offers."""
    return (name for name, known in MODULES[module].items() if isinstance(known, Offered))
