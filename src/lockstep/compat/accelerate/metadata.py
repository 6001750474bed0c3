"""What ``importlib.metadata`` says of the distribution whose interface is offered."""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path

from lockstep.compat.accelerate import interface

# Libraries look for the version, and for the name of a company, to tell Accelerate from packages of the same name.
METADATA = f"""\
Metadata-Version: 2.1
Name: accelerate
Version: {interface.VERSION}
Summary: The interface of Accelerate {interface.VERSION}, offered by Lockstep
Home-page: https://github.com/huggingface/accelerate
"""
FILES = {"METADATA": METADATA, "PKG-INFO": METADATA, "top_level.txt": "accelerate\n"}


class InterfaceDistribution(Distribution):
    """A distribution without files."""

    def read_text(self, filename: str) -> str | None:
        return FILES.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path
