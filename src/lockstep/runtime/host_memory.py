"""How much host memory programs may still take: of the machine, and of the control groups that this process is in.

Containers and Slurm limit memory by control groups. A process that takes more than its group has left is killed,
however much the machine has. Reference: Linux, "Control Group v2" and "Memory Resource Controller" (version 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Limit, and what is taken.
VERSION_2 = ("memory.max", "memory.current")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def free_host_bytes() -> int:
    """Return bytes that are free for programs, in the tightest control group or on the machine, whichever has less."""
    return min([int(psutil.virtual_memory().available), *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Yield bytes that each control group around this process may still take."""
    for folder, (limit, taken) in _groups():
        try:
            most, now = (folder / limit).read_text().strip(), int((folder / taken).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            # The root has no limit, and groups outside of a container are not to be seen.
            continue
        if most == "max":
            continue
        # Pages of files are taken too, and given back when programs want memory. In version 1 the totals are those
        # with the groups inside.
        stat = {name: int(count) for name, _, count in (line.partition(" ") for line in lines)}
        files = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        yield max(0, int(most) - now + files)


def _groups() -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield the folder of this process's control group and those above it, and the names of the files in it."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        # Not Linux.
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = MOUNT, VERSION_2
        elif "memory" in controllers.split(","):
            mount, names = MOUNT / "memory", VERSION_1
        else:
            continue
        folder = mount / path.lstrip("/")
        yield folder, names
        # A limit of a group holds for all groups inside of it.
        while folder != mount:
            folder = folder.parent
            yield folder, names
