"""What a process did to files below a folder, as the kernel saw it: reads the record of ``strace -f -y``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

STRACE = ("strace", "-f", "-qq", "-y", "-s", "0", "-e", "trace=%file,%desc")
KINDS = {
    "open": "open", "openat": "open", "openat2": "open", "creat": "open",
    "write": "write", "pwrite64": "write", "writev": "write", "pwritev": "write", "pwritev2": "write",
    "ftruncate": "truncate", "truncate": "truncate",
    "fsync": "sync", "fdatasync": "sync",
    "rename": "rename", "renameat": "rename", "renameat2": "rename",
    "unlink": "unlink", "unlinkat": "unlink", "rmdir": "rmdir", "mkdir": "mkdir", "mkdirat": "mkdir",
}  # fmt: skip
HARMLESS = re.compile(
    "(new|l|f)?(fstatat|stat).*|statx|statfs|access|faccessat2?|readlink(at)?|getdents(64)?|getcwd|chdir|read|pread64|lseek"
    "|close|fcntl|ioctl|dup[23]?|poll|ppoll|select|epoll.*|munmap|getxattr|execve"
)
FOR_WRITING = re.compile("O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")


def changes(record: Path, root: Path) -> list[str]:
    """Calls that succeeded and that ``Interposer`` should have seen, as it tells them.

    Calls that could change a file and are unknown here come with their names, so that a comparison shows them.
    """
    found = []
    for name, arguments, result in _calls(record):
        path = _path(arguments)
        if result.startswith("-1") or not (path == str(root) or path.startswith(f"{root}/")):
            continue
        relative = os.path.relpath(path, root)
        is_rmdir = name == "unlinkat" and "AT_REMOVEDIR" in arguments
        kind = "rmdir" if is_rmdir else KINDS.get(name, name)
        if name in ("mmap", "mmap2"):
            harmless = "MAP_SHARED" not in arguments or "PROT_WRITE" not in arguments
        else:
            harmless = HARMLESS.fullmatch(name) is not None
        if not harmless and (kind != "open" or name == "creat" or FOR_WRITING.search(arguments)):
            found.append(f"{kind} {relative}")
    return found


def _calls(record: Path) -> Iterator[tuple[str, str, str]]:
    """Name, arguments and result of each call, in the order in which they began."""
    whole: list[tuple[str, str, str] | None] = []
    begun: dict[str, tuple[int, str, str]] = {}
    for line in record.read_text(errors="replace").splitlines():
        process, _, text = line.partition(" ")
        text = text.strip()
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)\) += (.*)", text):
            place, name, arguments = begun.pop(process)
            whole[place] = (name, arguments + resumed[1], resumed[2])
        elif started := re.match(r"(\w+)\((.*) <unfinished \.\.\.>$", text):
            begun[process] = (len(whole), started[1], started[2])
            whole.append(None)
        elif complete := re.match(r"(\w+)\((.*)\) += (.*)", text):
            whole.append((complete[1], complete[2], complete[3]))
    return (call for call in whole if call is not None)


def _path(arguments: str) -> str:
    """Of the first file that the call names: by a descriptor, a name, or a name below a descriptor's folder."""
    folder = re.match(r"(?:AT_FDCWD|\d+)<([^>]*)>", arguments)
    name = re.match(r'(?:(?:AT_FDCWD|\d+)(?:<[^>]*>)?, )?"([^"]*)"', arguments)
    return os.path.normpath(os.path.join(folder[1] if folder else "/", name[1] if name else ""))
