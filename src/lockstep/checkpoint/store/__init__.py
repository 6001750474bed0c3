"""Where checkpoints lie: local directories, and whatever fsspec opens."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from lockstep.checkpoint.store.base import Store
from lockstep.checkpoint.store.local import LocalStore
from lockstep.errors import ConfigError
from lockstep.lazy import names_of_modules


def store_for(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the store, and the path in its own form: a local path, or a URL that shows no credentials.

    Raises:
        ConfigError: fsspec cannot open the URL, or it is none that directories can lie below.
        CheckpointError: the place does not answer.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise ConfigError(f"{text!r} holds a NUL character, so it is not a path. Correct it.")
    if "://" in text:
        # What a URL needs, it alone imports.
        from lockstep.checkpoint.store.url import local_path, without_caches

        url = without_caches(text)
        local = local_path(url)
        if local is None:
            from lockstep.checkpoint.store.remote import remote_store

            return remote_store(url)
        text = local
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text) and not os.path.isdir(text.split("/")[0]):
        raise ConfigError(
            f"{text} looks like a URL, but one of its slashes is missing, because pathlib.Path removes it. Pass "
            "URLs as str."
        )
    place = os.path.abspath(os.path.expanduser(text))
    # What a link stands for is replaced, not the link.
    return LocalStore(), os.path.realpath(place) if os.path.islink(place) else place


if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "base": ["BLOCK_BYTES"],
            "local": ["DirectoryLock"],
            "url": ["parse_url"],
            "verify": ["verify_checkpoint"],
        },
    )
