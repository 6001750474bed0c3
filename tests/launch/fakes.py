"""Programs named ssh, srun, ... that record byte for byte how they were called, and end or run as told."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

# argv and the environment as in /proc, and what the standard input has until its first line break
RECORDER = """#!{python} -IS
import os, sys
folder = os.path.join({folder!r}, "{name}-" + str(os.getpid()))
os.mkdir(folder)
line = sys.stdin.buffer.readline() if {reads} else b""
for name, content in (
    ("argv", open("/proc/self/cmdline", "rb").read().split(b"\\0", 3)[3]),
    ("environ", open("/proc/self/environ", "rb").read()),
    ("stdin", line),
):
    with open(os.path.join(folder, name + ".part"), "wb") as file:
        file.write(content)
    os.rename(os.path.join(folder, name + ".part"), os.path.join(folder, name))
{then}
"""

# what sshd does: one string for a shell, in a directory of its own, without the environment of the client
AS_SSHD = """#!{python} -IS
import os, sys
arguments = sys.argv[sys.argv.index("--") + 1:]
os.chdir("/")
os.execve("/bin/sh", ["sh", "-c", " ".join(arguments[1:])], {{"HOME": {home!r}, "PATH": "/usr/bin:/bin"}})
"""


@dataclass(frozen=True)
class Call:
    """How a program was called; ``argv`` without its own name."""

    argv: list[bytes]
    environ: bytes
    stdin: bytes


class Fakes:
    """A folder for PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.records = folder / "records"
        self.folder.mkdir()
        self.records.mkdir()

    @property
    def path(self) -> str:
        return f"{self.folder}:{os.environ['PATH']}"

    def recorder(self, name: str, then: str = "", reads: bool = True) -> None:
        """``then``: Python that the program runs after it has recorded its call."""
        self._write(
            name,
            RECORDER.format(
                python=sys.executable, folder=str(self.records), name=name, reads=reads, then=then
            ),
        )

    def ssh(self) -> None:
        """An ssh for which every host is this machine."""
        self._write("ssh", AS_SSHD.format(python=sys.executable, home=str(self.folder)))

    def calls(self, name: str) -> list[Call]:
        """The calls of a program so far."""
        found = []
        for record in sorted(self.records.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime_ns):
            argv, environ, stdin = ((record / part).read_bytes() for part in ("argv", "environ", "stdin"))
            found.append(Call(argv.split(b"\0")[:-1], environ, stdin))
        return found

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)


CANARY = "canary-7f3a"
SECRET_NAMES = [
    f"{owner}_{word}"
    for owner in ("HF", "AWS", "WANDB", "GITHUB", "LOCKSTEP", "NCCL", "TORCH", "GLOO", "AZURE", "MY")
    for word in ("TOKEN", "SECRET_ACCESS", "API_KEY", "PASSWORD", "CREDENTIALS")
]


def canaries() -> dict[str, str]:
    """Fifty secrets in the environment."""
    return {name: f"{CANARY}-{number}" for number, name in enumerate(SECRET_NAMES)}
