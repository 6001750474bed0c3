"""How a worker fails: its error reaches the launcher, and the root cause is printed first."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from lockstep.config.sources import error_file

# how long a rank that failed because another one did leaves the agent to end it quietly
CONSEQUENCE_WAIT_S = 2.0
# a failed rank whose teardown hangs (threads, communicators) is ended after this
TEARDOWN_LIMIT_S = 3.0

# what torch.distributed, gloo and NCCL say when a peer went away
CONSEQUENCE_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was closed",
    "broken pipe",
    "socket closed",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "ncclremoteerror",
    "ncclsystemerror",
    "is likely due to a remote peer",
)


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that another rank failed or went away."""
    if getattr(error, "caused_by_rank", None) is not None:
        return True
    if not any(kind.__module__.startswith("torch") for kind in type(error).__mro__) and type(error) not in (
        RuntimeError,
        ConnectionResetError,
        BrokenPipeError,
    ):
        return False
    text = str(error).lower()
    return any(sign in text for sign in CONSEQUENCE_SIGNS)


def install_excepthook() -> None:
    """Under an elastic agent, report an uncaught exception to it in torch's format; otherwise do nothing."""
    path = error_file()
    if path is None or getattr(sys.excepthook, "reports_to_agent", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return  # the launcher was interrupted, passed it on to all ranks, and says so once
        consequence = is_consequence(error)
        _write_report(path, error, consequence)
        if consequence:
            _flush()
            time.sleep(CONSEQUENCE_WAIT_S)
        previous(kind, error, trace)
        _flush()
        _limit_teardown()

    hook.reports_to_agent = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def describe(error: BaseException, consequence: bool, time_ns: int) -> dict[str, Any]:
    """The report: torch's fields, and ours under ``lockstep``."""
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(time_ns // 1_000_000_000),
                "lockstep": {"consequence": consequence, "time_ns": time_ns},
            },
        }
    }


def _write_report(path: str, error: BaseException, consequence: bool) -> None:
    try:
        # written aside and renamed: the agent never reads half a report
        with open(path + ".part", "w") as file:
            json.dump(describe(error, consequence, time.time_ns()), file)
        os.replace(path + ".part", path)
    except OSError as problem:  # the traceback itself is still printed
        sys.stderr.write(f"lockstep: cannot write the error report {path}: {problem}\n")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _limit_teardown() -> None:
    # faulthandler's timer is a C thread, so it fires even when the interpreter is stuck while ending
    faulthandler.dump_traceback_later(TEARDOWN_LIMIT_S, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
