"""Ends what a launcher leaves behind, whatever way it ended: its workers and all that they started.

    python -I -S guard.py LAUNCH_ID < pipe held by the launcher > pipe that the launcher reads

The launcher writes ``done`` when nothing is to be ended. If the pipe closes without it, every process with
this launch's identity in its environment is killed: data-loader workers and children of shell scripts
too, which a death signal for direct children does not reach. Twice a second it says that it is there. Linux;
elsewhere it does nothing but that.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

ID_VARIABLE = "LOCKSTEP_LAUNCH_ID"
# in the environment of the watches that workers leave (exec_worker.py): they end by themselves
WATCH_VARIABLE = "LOCKSTEP_ORPHAN_WATCH"
DONE = b"done"
BEAT_S = 0.5
ROUNDS = 50


def members(launch_id: str, with_watches: bool = False) -> list[int]:
    """Processes of this user whose environment carries the launch's identity."""
    mark, watch = f"{ID_VARIABLE}={launch_id}".encode(), f"{WATCH_VARIABLE}=1".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:  # it ended meanwhile, or belongs to someone else
            continue
        if mark in variables and (with_watches or watch not in variables):
            found.append(int(entry))
    return found


def end(launch_id: str, with_watches: bool = False) -> None:
    """Kill the members until none is left; new ones may be forked while we look."""
    for _ in range(ROUNDS):
        pids = [pid for pid in members(launch_id, with_watches) if pid != os.getpid()]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # ended between the look and the kill
                continue
        time.sleep(0.02)


def last_words() -> bytes:
    """What the launcher has written by its end. Meanwhile says twice a second that this process lives."""
    words = b""
    os.set_blocking(1, False)
    ready = select.poll()
    ready.register(0, select.POLLIN)
    while True:
        with suppress(OSError):  # the launcher is stopped, or gone, which the other pipe says
            os.write(1, b".")
        if ready.poll(1000 * BEAT_S):
            read = os.read(0, 64)
            if not read:
                return words
            words += read


def main(argv: list[str]) -> None:
    """Wait for the launcher's end, then end what is left."""
    if last_words() != DONE and os.path.isdir("/proc/self"):
        end(argv[1])


if __name__ == "__main__":
    main(sys.argv)
