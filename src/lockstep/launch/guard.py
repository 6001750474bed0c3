"""Ends what a launcher leaves behind, whatever way it ended: its workers and all that they started.

    python -I -S guard.py LAUNCH_ID < pipe held by the launcher

The launcher writes ``done`` when nothing is to be ended. If the pipe closes without it, every process with
this launch's identity in its environment is killed: data-loader workers and children of shell scripts
too, which a death signal for direct children does not reach. Linux; elsewhere it does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time

ID_VARIABLE = "LOCKSTEP_LAUNCH_ID"
DONE = b"done"
ROUNDS = 50


def members(launch_id: str) -> list[int]:
    """Processes of this user whose environment carries the launch's identity."""
    mark = f"{ID_VARIABLE}={launch_id}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:  # it ended meanwhile, or belongs to someone else
            continue
    return found


def end(launch_id: str) -> None:
    """Kill the members until none is left; new ones may be forked while we look."""
    for _ in range(ROUNDS):
        pids = [pid for pid in members(launch_id) if pid != os.getpid()]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # ended between the look and the kill
                continue
        time.sleep(0.02)


def main(argv: list[str]) -> None:
    """Wait for the launcher's end, then end what is left."""
    if sys.stdin.buffer.read() != DONE and os.path.isdir("/proc/self"):
        end(argv[1])


if __name__ == "__main__":
    main(sys.argv)
