"""Hostile checkpoints: every digest is right, and yet the contents must not be taken at their word.

Each function below changes a draft of a good checkpoint in one way or in several ways, one case for each.
"""

from __future__ import annotations

from pathlib import Path

from checkpoint.hostile.case import Case
from checkpoint.hostile.documents import documents, values
from checkpoint.hostile.files import links, manifests, names, special_files, tensor_files
from checkpoint.hostile.gadgets import gadgets
from checkpoint.hostile.indexes import indexes
from checkpoint.hostile.states import generators, optimizers, states

__all__ = ["Case", "cases"]


def cases(outside: Path) -> list[Case]:
    """All cases. ``outside`` is a folder with ``secret.bin``, a copy of a good checkpoint and a place for markers."""
    groups = (
        [Case("nothing is wrong", lambda draft: None, "harmless")],
        manifests(),
        names(outside),
        links(outside),
        special_files(),
        documents(),
        indexes(outside),
        tensor_files(),
        values(),
        optimizers(),
        states(),
        generators(),
        gadgets(outside),
    )
    found = [case for group in groups for case in group]
    assert len({case.name for case in found}) == len(found)
    return found
