"""How large a model is, and which type each tensor of a training step has.

The types are one table, which the docs show, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from lockstep.config.enums import PrecisionType
from lockstep.config.parallel import Parallel
from lockstep.config.values import parse_integer, parse_precision, repr_short
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
    """Return a number of parameters such as ``1.3B``, ``350M``, ``7e9`` or ``124439808``; raises
    ConfigError.
    """
    match = COUNT.fullmatch(text.strip())
    number = Decimal(match[1]) * UNITS[match[2].upper()] if match else Decimal(0)
    if not 1 <= number <= MAX_PARAMETERS or number % 1:
        raise ConfigError(
            f"{origin}={repr_short(text)} is not a whole number of parameters from 1 to 1000T. Write it like 1.3B, "
            "350M, 7e9 or 124439808."
        )
    return int(number)


NONE = "-"

# tensor: (one process and DDP, ZeRO). A word in capitals is looked up in `dtypes`.
TABLE: dict[str, tuple[str, str]] = {
    "stored weights": ("fp32", "fp32"),
    "weights on the wire": (NONE, "WEIGHTS_WIRE"),
    "gathered weights": (NONE, "COMPUTE"),
    "activations": ("COMPUTE", "COMPUTE"),
    "unsharded gradients": ("fp32", "UNSHARDED"),
    "gradient reduction": ("fp32", "AVERAGE"),
    "gradients on the wire": ("fp32", "GRADIENTS_WIRE"),
    "sharded gradients": (NONE, "fp32"),
    "optimizer state": ("fp32", "fp32"),
    "loss scale": ("SCALE", "SCALE"),
}

COMPUTE = {
    PrecisionType.NO: "fp32",
    PrecisionType.BF16: "bf16",
    PrecisionType.FP16: "fp16",
    # What is kept and sent is in bf16; 8 bits are inside of matrix products only.
    PrecisionType.FP8: "bf16",
}

QUANTIZED_BLOCK = 256
"""Numbers that share one fp32 scale in a quantised collective."""

BYTES: dict[str, Fraction] = {
    NONE: Fraction(0),
    "fp32": Fraction(4),
    "bf16": Fraction(2),
    "fp16": Fraction(2),
    "int8": 1 + Fraction(4, QUANTIZED_BLOCK),
    "int4": Fraction(1, 2) + Fraction(4, QUANTIZED_BLOCK),
}
"""Bytes of one number, with its part of the scale."""


def dtypes(parallel: Parallel, mixed_precision: str, ranks: int = 2) -> dict[str, str]:
    """Tensor, as named in ``TABLE``, to its type, a key of ``BYTES``.

    In one process nothing is sharded or sent. One process and DDP compute under autocast, which keeps
    operations such as softmax in fp32. ZeRO casts the shards of the fp32 weights before it gathers them, and
    stage 1 adds up the whole gradients of a window in the type in which it will average them.

    Raises:
        ConfigError: ``mixed_precision`` is not ``no``, ``bf16``, ``fp16`` or ``fp8``.
    """
    precision = parse_precision(mixed_precision, "mixed_precision")
    compute = COMPUTE[precision]
    average = str(parallel.reduce or compute)
    resolved = {
        "COMPUTE": compute,
        "WEIGHTS_WIRE": str(parallel.quantized_weights or compute),
        "AVERAGE": average,
        "UNSHARDED": average if parallel.zero == 1 else compute,
        "GRADIENTS_WIRE": str(parallel.quantized_gradients or average),
        "SCALE": "fp32" if precision is PrecisionType.FP16 else NONE,
    }
    sharded = parallel.shards and ranks > 1
    types = {tensor: resolved.get(kinds[sharded], kinds[sharded]) for tensor, kinds in TABLE.items()}
    if ranks == 1:
        types["gradient reduction"] = types["gradients on the wire"] = NONE
    return types
