"""Plain files only: what another file names, or what lies in a folder that others filled, may be anything.

Opening a pipe waits for a writer, a device may never end, and a link may lead anywhere.
"""

from __future__ import annotations

import os
import stat

from lockstep.config.regular_file import KINDS
from lockstep.errors import CheckpointError

_OF_THE_SYSTEM = ("/proc/", "/sys/")
"""What lies there looks like files, but is made by the kernel while it is read."""


def check_plain_file(path: str) -> None:
    """Raise CheckpointError if ``path`` is, or is a link to, anything but a plain file; it is not opened.

    Raises:
        OSError: there is nothing.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise _refused(path, KINDS.get(stat.S_IFMT(mode), "no plain file"))
    if os.path.realpath(path).startswith(_OF_THE_SYSTEM):
        raise _refused(path, "a file that the system makes while it is read")


def check_shard(folder: str, name: str) -> None:
    """As ``check_plain_file``, for a ``name`` that an index in ``folder`` gives: it must not lead out of the folder.

    Links into the ``blobs`` beside ``snapshots`` do not: such is the cache of the Hugging Face Hub.

    Raises:
        OSError: there is nothing.
    """
    path = os.path.join(folder, name)
    check_plain_file(path)
    here, there = os.path.realpath(folder), os.path.realpath(path)
    inside = [here]
    if os.path.basename(os.path.dirname(here)) == "snapshots":
        inside.append(os.path.join(os.path.dirname(os.path.dirname(here)), "blobs"))
    if not any(os.path.commonpath([place, there]) == place for place in inside):
        raise CheckpointError(
            f"{path} is a link out of its folder, to {there}. Replace it by the file itself (cp -L), or name that "
            "file directly."
        )


def read_plain_file(path: str, limit: int) -> bytes:
    """The content of a plain file, of at most ``limit`` bytes.

    Raises:
        OSError: it cannot be opened.
        CheckpointError: it is no plain file, or larger.
    """
    check_plain_file(path)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):  # it was replaced meanwhile
            raise _refused(path, "no plain file")
        content = file.read(limit + 1) if found.st_size <= limit else b""
    if found.st_size > limit or len(content) > limit:
        size = max(found.st_size, len(content))
        raise CheckpointError(
            f"{path} has {size} bytes, but at most {limit} are read. Check that it is the file that is meant."
        )
    return content


def _refused(path: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is {kind}, where a plain file is needed. Copy or download the file again."
    )
