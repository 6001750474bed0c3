"""Names of files in a checkpoint."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from lockstep.errors import CheckpointError

MANIFEST = "manifest.json"
OURS = re.compile(r"(tensors|state|rank-\d{5,6})\.json|(model(_\d+)?|state)-\d{5,6}(-\d{3,})?\.safetensors")
"""Names that ``save_state`` gives to files."""


def check_name(name: str) -> str:
    """``name`` if it is a relative path of plain names, as files of a checkpoint have.

    Raises:
        CheckpointError: it is absolute, leaves its folder, or has other characters.
    """
    parts = name.split("/")
    plain = all(re.fullmatch(r"[A-Za-z0-9_ .,=+@-]{1,255}", part) and part.strip(".") for part in parts)
    if not plain or str(PurePosixPath(name)) != name or len(name) > 1024:
        raise CheckpointError(
            f"A file of the checkpoint is named {name[:80]!r}, which is not a plain relative name. Load another "
            "checkpoint: nothing outside its folder is read."
        )
    return name
