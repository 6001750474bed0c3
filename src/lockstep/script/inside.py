"""In a process of its own: runs a script as the interpreter would, with what looks on registered before."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from lockstep.config.options import Options
from lockstep.config.parallel import Parallel
from lockstep.config.world import BatchSizes


def run_script(program: Sequence[str], is_module: bool) -> None:
    """Run the script, or the module, that ``program`` begins with; the other words are its arguments."""
    sys.argv = list(program)
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    # The interpreter would put it there.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


class WatchedScript(Protocol):
    """What looks on while a script runs."""

    def fail(self, error: BaseException) -> None:
        """Note that the script raised ``error``, or ended with another code than 0."""

    def finish(self) -> None:
        """Note that the script came to its end."""


def run_observed(run: WatchedScript, program: Sequence[str], is_module: bool) -> None:
    """Run ``run_script``, whose end ``run`` hears of."""
    try:
        run_script(program, is_module)
    except SystemExit as error:
        if error.code not in (None, 0):
            run.fail(error)
            raise
    except Exception as error:
        run.fail(error)
        raise error.with_traceback(of_script(error.__traceback__)) from error.__cause__
    except BaseException as error:
        run.fail(error)
        raise
    run.finish()


def import_as_accelerate() -> None:
    """Make ``import accelerate`` mean this library for the script."""
    from lockstep.compat.accelerate.alias import install

    install()


def of_one_process(options: Options) -> Options:
    """Return the same of a plain run in one process: nothing is split, compiled, or shared out."""
    return replace(
        options,
        parallel=Parallel(),
        compile_options=None,
        compile_blocks=False,
        batch=BatchSizes(),
        fsdp_plugin=None,
        deepspeed_plugin=None,
        parallelism_config=None,
    )


def of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script's first own frame on; the whole, if the script did not begin."""
    frame, is_run = traceback, False
    while frame is not None:
        is_runpy = frame.tb_frame.f_globals.get("__name__") == "runpy"
        if is_run and not is_runpy:
            return frame
        is_run = is_run or is_runpy
        frame = frame.tb_next
    return traceback
