"""What every worker passes through before it becomes the user's command.

    python -I -S exec_worker.py PARENT_PID COMMAND [ARGUMENT ...]

Ties the worker's life to its parent's, then replaces itself, so that the user's script is the real
``__main__`` of an ordinary interpreter. Imports nothing of the package: it costs some milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # the codes of POSIX shells


def die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux only) for SIGKILL at the parent's death; exit if that has happened already."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Replace this process by the command; on failure exit as a shell would."""
    die_with_parent(int(argv[1]))
    command = argv[2:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"lockstep launch: cannot run {command[0]}: {error.strerror}.\n")
        raise SystemExit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE) from None


if __name__ == "__main__":
    main(sys.argv)
