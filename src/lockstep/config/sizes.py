"""Sizes of memory and files as people write them."""

from __future__ import annotations

import re

from lockstep.config.values import repr_short
from lockstep.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def bytes_of(size: int | float | str, origin: str, at_least: int = 0) -> int:
    """Bytes of a number, or of a text such as ``"10GB"`` or ``"512MiB"``, in any case.

    Raises:
        ConfigError: it is neither, or below ``at_least``; the message begins with ``origin``.
    """
    match = re.fullmatch(
        r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?I?B?)\s*", str(size)[:80].upper(), re.ASCII
    )
    factor = _UNITS.get(match[2]) if match else None
    number = -1
    if match is not None and factor is not None and not isinstance(size, bool):
        number = int(match[1]) * factor if match[1].isdecimal() else int(float(match[1]) * factor)
    if number < at_least:
        raise ConfigError(
            f"{origin}={repr_short(size)} is not a size. Pass a number of bytes or a text such as '10GB' or '512MiB'."
        )
    return number
