"""What every worker passes through before it becomes the user's command.

    python -I -S exec_worker.py PARENT_PID COMMAND [ARGUMENT ...]

Ties the worker's life to its parent's, leaves a watch for what the worker is going to start, then replaces itself,
so that the user's script is the real ``__main__`` of an ordinary interpreter. Imports nothing of the package: it
costs some milliseconds.

    python -I -S exec_worker.py --watch DESCRIPTOR LAUNCH_ID

is that watch: it waits for the launcher's end and then ends what is left of the launch. The guard does the same; the
watches, which are no children of the launcher or of the workers, are for a guard that ended with its launcher.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # the codes of POSIX shells
GUARD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guard.py")


def die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux only) for SIGKILL at the parent's death; exit if that has happened already."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def leave_watch(launcher: int, launch_id: str) -> None:
    """Start the watch, a grandchild in a session of its own: the worker gets no child that it does not know."""
    try:
        descriptor = os.pidfd_open(launcher)  # Linux 5.3
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
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nowhere, standard)
        os.dup2(descriptor, 3)
        os.set_inheritable(3, True)  # where it was that already
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.environ["LOCKSTEP_ORPHAN_WATCH"] = "1"
        os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, "--watch", "3", launch_id])
    finally:
        os._exit(1)


def watch(descriptor: int, launch_id: str) -> None:
    """Wait for the end of the launcher, a process that the descriptor stands for, and end what it left."""
    end = runpy.run_path(GUARD)["end"]
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    [(_, event)] = ended.poll()
    if event & select.POLLIN:
        end(launch_id)


def main(argv: list[str]) -> None:
    """Replace this process by the command; on failure exit as a shell would."""
    if argv[1] == "--watch":
        watch(int(argv[2]), argv[3])
        return
    parent, launch_id = int(argv[1]), os.environ.get("LOCKSTEP_LAUNCH_ID")
    if launch_id:
        leave_watch(parent, launch_id)
    die_with_parent(parent)
    command = argv[2:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"lockstep launch: cannot run {command[0]}: {error.strerror}.\n")
        raise SystemExit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE) from None


if __name__ == "__main__":
    main(sys.argv)
