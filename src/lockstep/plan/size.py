"""How large a model is, and the ways to write that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from lockstep.config.values import parse_integer, repr_short
from lockstep.errors import ConfigError

MAX_PARAMETERS = 10**15
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
COUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE]\+?[0-9]{1,2})?)([KMBT]?)", flags=re.IGNORECASE)


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters.

    - ``parameters``: all. ``trainable``: those that get gradients.
    - ``block``: those of the largest block; 0: blocks are not counted.
    - ``root``: those in no block, which stay gathered from forward to backward.

    Raises:
        ConfigError: a number is out of range.
    """

    parameters: int
    trainable: int
    block: int = 0
    root: int = 0

    def __post_init__(self) -> None:
        bounds = {
            "parameters": (1, MAX_PARAMETERS),
            "trainable": (0, self.parameters),
            "root": (0, self.parameters),
            "block": (0, self.parameters - self.root),
        }
        for name, (low, high) in bounds.items():
            parse_integer(getattr(self, name), name, low, high)


def parse_count(text: str, origin: str) -> int:
    """A number of parameters such as ``1.3B``, ``350M``, ``7e9`` or ``124439808``; raises ConfigError."""
    match = COUNT.fullmatch(text.strip())
    number = Decimal(match[1]) * UNITS[match[2].upper()] if match else Decimal(0)
    if not 1 <= number <= MAX_PARAMETERS or number % 1:
        raise ConfigError(
            f"{origin}={repr_short(text)} is not a whole number of parameters from 1 to 1000T. Write it like 1.3B, "
            "350M, 7e9 or 124439808."
        )
    return int(number)
