"""What runs beside a launch in a bare interpreter (``python -I -S bare.py``): imports nothing of the package.

    bare.py --worker PARENT_PID COMMAND [ARGUMENT ...]

is what every worker passes through, in some milliseconds: ties its life to its parent's, leaves a watch for what it is
going to start, then replaces itself, so that the user's script is the real ``__main__`` of an ordinary interpreter.

    bare.py --watch DESCRIPTOR LAUNCH_ID

is that watch: it waits for the launcher's end, and then ends what is left of the launch, as the guard does. Watches,
which are no children of the launcher or of the workers, are for a guard that ended with its launcher.

    bare.py --guard LAUNCH_ID < pipe held by the launcher

ends what a launcher leaves behind, whatever way it ended. The launcher writes ``done`` when nothing is to be ended. If
the pipe closes without it, every process with this launch's identity in its environment is killed: data-loader workers
and children of shell scripts too, which a death signal for direct children does not reach. Then it removes the launch's
checkpoints in memory and its secret. Linux; elsewhere it does nothing.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress

# Those of config/sources.py, of which nothing can be imported here.
ID_VARIABLE = "LOCKSTEP_LAUNCH_ID"
# The folder in memory in which workers keep checkpoints, as long as the launch lasts.
MEMORY_VARIABLE = "LOCKSTEP_MEMORY_FOLDER"
# The folder in which the launch keeps its secret and the reports of errors.
FOLDER_VARIABLE = "LOCKSTEP_LAUNCH_FOLDER"
# In the environment of the watches: they end by themselves.
WATCH_VARIABLE = "LOCKSTEP_ORPHAN_WATCH"
DONE = b"done"
ROUNDS = 50
PR_SET_PDEATHSIG = 1
# The codes of POSIX shells.
NOT_EXECUTABLE, NOT_FOUND = 126, 127


def members(launch_id: str, with_watches: bool = False, kept: Collection[int] = ()) -> list[int]:
    """Return the processes of this user in whose environment the launch has its identity, without those ``kept``."""
    mark, watch = f"{ID_VARIABLE}={launch_id}".encode(), f"{WATCH_VARIABLE}=1".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in kept:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            # It ended meanwhile, or belongs to someone else.
            continue
        if mark not in variables or (watch in variables and not with_watches):
            continue
        found.append(int(entry))
    return found


def end(launch_id: str, with_watches: bool = False, kept: Collection[int] = ()) -> None:
    """Kill the members until none is left; new ones may be forked while we look."""
    for _ in range(ROUNDS):
        pids = [pid for pid in members(launch_id, with_watches, kept) if pid != os.getpid()]
        if not pids:
            return
        for pid in pids:
            # Ended between the look and the kill.
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove_folders() -> None:
    """Remove the checkpoints that the launch has in memory, and its secret; nobody needs them any more."""
    for variable in (MEMORY_VARIABLE, FOLDER_VARIABLE):
        folder = os.environ.get(variable)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def run_guard(launch_id: str) -> None:
    """Wait for the launcher's end, then end what is left."""
    words = b""
    while read := os.read(0, 64):
        words += read
    # Without /proc nothing tells which processes belong to the launch.
    if words != DONE and os.path.isdir("/proc/self"):
        end(launch_id)
        remove_folders()


def run_watch(descriptor: int, launch_id: str) -> None:
    """Wait for the end of the launcher, a process that the descriptor stands for, and end what it left."""
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    [(_, event)] = ended.poll()
    # POLLNVAL would say that the descriptor is none, so that nothing has ended.
    if event & select.POLLIN:
        end(launch_id)
        remove_folders()


def leave_watch(launcher: int, launch_id: str) -> None:
    """Start the watch, a grandchild in a session of its own: the worker gets no child that it does not know."""
    try:
        # Since Linux 5.3.
        descriptor = os.pidfd_open(launcher)
    except (AttributeError, OSError):
        return
    middle = os.fork()
    if middle:
        os.close(descriptor)
        os.waitpid(middle, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        # Nothing of the launch stays open here: a pipe that the watch held would never close.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nowhere, standard)
        os.dup2(descriptor, 3)
        # dup2 of 3 onto itself leaves the flag as it was.
        os.set_inheritable(3, True)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.environ[WATCH_VARIABLE] = "1"
        os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, "--watch", "3", launch_id])
    finally:
        # execv does not return; whatever has failed, a fork of the worker must not run on.
        os._exit(1)


def die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux only) for SIGKILL at the parent's death; exit if that has happened already."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Asked first, then looked: the parent may have died in between.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def become_worker(parent: int, command: list[str]) -> None:
    """Replace this process by the command; on failure exit as a shell would."""
    launch_id = os.environ.get(ID_VARIABLE)
    if launch_id:
        leave_watch(parent, launch_id)
    die_with_parent(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"lockstep: cannot run {command[0]}: {error.strerror}.\n")
        raise SystemExit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE) from None


def main(role: str, first: str, *rest: str) -> None:
    if role == "--guard":
        run_guard(first)
    elif role == "--watch":
        run_watch(int(first), rest[0])
    else:
        become_worker(int(first), list(rest))


if __name__ == "__main__":
    main(*sys.argv[1:])
