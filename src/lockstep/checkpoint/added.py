"""Files that somebody put into the folder of a checkpoint after it was saved, such as a model's export.

They are no part of the checkpoint: loading passes over them. They are not lost with it either: what replaces the
checkpoint takes them along, and where it is removed they stay.
"""

from __future__ import annotations

import logging

from lockstep.checkpoint.format.names import MANIFEST, OURS
from lockstep.checkpoint.store.base import Store, UnreachableError
from lockstep.checkpoint.store.verify import read_manifest, root_of
from lockstep.config.values import listed
from lockstep.errors import CheckpointError

logger = logging.getLogger("lockstep.checkpoint")


def added_files(store: Store, directory: str) -> list[str]:
    """What lies in a published checkpoint and is not in its manifest, by relative name; links are not followed.

    Where the manifest is damaged, it is what has a name that no file of ours has.
    """
    try:
        manifest = read_manifest(store, directory)
        root, names = root_of(directory, manifest), manifest.files.keys()
    except UnreachableError:
        raise
    except CheckpointError:
        root, names = directory, None
    try:
        found = store.files(root)
    except UnreachableError:
        raise
    except (OSError, CheckpointError):
        return []
    return sorted(
        name
        for name in found
        if name != MANIFEST and not (OURS.fullmatch(name) if names is None else name in names)
    )


def is_rest(store: Store, directory: str) -> bool:
    """Whether a folder holds files, but none of a checkpoint's."""
    try:
        names = store.files(directory).keys()
    except (OSError, CheckpointError):
        return False
    return bool(names) and not any(name == MANIFEST or OURS.fullmatch(name) for name in names)


def remove(store: Store, directory: str) -> None:
    """Remove a checkpoint, but for files that were added to it, which stay where they are."""
    kept = added_files(store, directory)
    store.remove(directory, kept)
    if kept:
        logger.warning(
            "Removed the checkpoint %s, but kept %s, which was added to it. Remove that yourself when you no longer "
            "need it.",
            directory,
            listed(kept),
        )


def settle(store: Store, directory: str) -> None:
    """Remove what a checkpoint has replaced; files that were added to that go on in its successor."""
    for older in store.candidates(directory):
        if older != directory:
            store.carry(older, directory, added_files(store, older))
    store.settle(directory)


def withdraw(store: Store, directory: str) -> None:
    """Remove a checkpoint in favour of the one that it had replaced, which gets the files that were added to it."""
    for older in store.candidates(directory):
        if older != directory:
            store.carry(directory, older, added_files(store, directory))
            break
    store.remove(directory)
