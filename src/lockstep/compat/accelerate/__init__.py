"""Accelerate's YAML and flags, and its modules under the name ``accelerate`` (``install``)."""

from typing import TYPE_CHECKING

from lockstep.compat.accelerate.alias import install
from lockstep.lazy import names_of_modules

__all__ = ["install"]

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "config_file": ["ONLY_IN_ACCELERATE", "from_yaml", "Ignored", "load", "OTHER_KEYS", "SECTIONS"],
            "flags": ["FOREIGN_FLAGS", "REFUSED"],
            "interface": ["find", "GATHERING", "MODULES", "names_in", "NotOffered", "Offered", "VERSION"],
            "names": ["NOT_OFFERED"],
            "sections": ["LAYOUT_KEYS", "LAYOUT_PREFIX", "MPI_KEYS"],
            "write": ["write_config"],
        },
    )
