"""Scripts run as by ``python script.py``: each in a fork of one interpreter that has torch imported, none of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, os, runpy, signal, sys
import pydantic, torch, torch._dynamo, torch.distributed.fsdp

while line := sys.stdin.readline():
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

limit_s, script, *arguments = json.loads(line)
signal.alarm(limit_s)
folder = os.path.dirname(script)
os.chdir(folder)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(script + ".output", os.O_WRONLY | os.O_CREAT), 1)
os.dup2(1, 2)
sys.path[0], sys.argv[:] = folder, [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


class WarmInterpreter:
    """One that has started; ``run`` takes one script after the other."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, script: Path, *arguments: str, limit_s: int = 120) -> tuple[int, str]:
        """The exit code, negative after a signal, and what was printed. The script runs in its folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([limit_s, os.path.abspath(script), *arguments]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, Path(f"{os.path.abspath(script)}.output").read_text()

    def close(self) -> None:
        self._process.communicate()
