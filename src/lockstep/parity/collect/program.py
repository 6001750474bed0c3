"""A script that is run inside of another program, as it is."""

from __future__ import annotations

import os
import runpy
import sys
from types import TracebackType


def of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Without the frames of what runs a script."""
    ours = ("__main__", "runpy", __name__)
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in ours:
        if (
            traceback.tb_frame.f_code.co_name == "<module>"
            and "runpy" not in traceback.tb_frame.f_code.co_filename
        ):
            break
        traceback = traceback.tb_next
    return traceback


def run_program(program: list[str], is_module: bool) -> None:
    """Run the script, or the module, that ``program`` begins with, as the interpreter would; ``sys.argv`` is set."""
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):  # the interpreter would put it there
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    runpy.run_path(program[0], run_name="__main__")
