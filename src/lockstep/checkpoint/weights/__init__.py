"""Weights alone, as other libraries read them: names of files, and how much goes into one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.values import bytes_of
from lockstep.lazy import names_of_modules

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What scripts import for files that others wrote.
PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"


def parse_size(size: int | str) -> int:
    """Parse ``size`` as bytes: a positive integer, or a text such as ``"10GB"`` or ``"512MiB"``."""
    return bytes_of(size, "max_shard_size", at_least=1)


if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "convert": ["open_weights", "write_file", "write_weights_folder"],
            "export": ["collect_stages"],
            "folder": ["WeightsFolder", "write_folder"],
            "model": ["write_weights"],
            "streams": ["ChunkedTensors", "slabs"],
        },
    )
