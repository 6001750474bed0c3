"""How a worker ends: exit codes that say more than "failed"; its error reaches the launcher, the root cause first."""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar

from lockstep.config.sources import error_file, shares_console
from lockstep.errors import DifferentCallsError
from lockstep.user_call import UserCall, call_in

PREEMPTED = 75
"""All ranks stopped at one step boundary and saved their state: run the same command again (``EX_TEMPFAIL``)."""

HANG = 124
"""A hang lasted longer than its limit and was ended (the code of ``timeout``)."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Those that ask a run to stop at a step boundary."""


def of_signal(number: int) -> int:
    """Return the code of a process that a signal ended, as shells count: 128 + its number."""
    return 128 + number


def first_line(error: BaseException) -> str:
    """Return the first line of what it says, without the full stop."""
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")


class Departures:
    """Ranks that have ended well. Written by a side thread, read by the main one."""

    _of_this_run: ClassVar[Departures]

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        self._changed = threading.Condition()
        self.is_watched = False
        """Whether anybody tells this process of the others' ends: without that there is nothing to wait for."""

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def add(self, rank: int) -> None:
        """Note that this rank has ended."""
        with self._changed:
            self._ranks.add(rank)
            self._changed.notify_all()

    def discard(self, rank: int) -> None:
        """Note that this rank is there again: its process has made another ``Accelerator``."""
        with self._changed:
            self._ranks.discard(rank)

    def ranks(self, patience_s: float = 0.0) -> list[int]:
        """Return the ranks that have ended. Waits for the first one, whose end is seen sooner than heard of."""
        with self._changed:
            if self.is_watched:
                self._changed.wait_for(lambda: bool(self._ranks), patience_s)
            return sorted(self._ranks)


Departures._of_this_run = Departures()


def departures() -> Departures:
    """Return which other ranks have ended their part of this process's run."""
    return Departures._of_this_run


def forget_departures() -> None:
    """Begin a new list, since the run is over for this process; late reports count for the old one."""
    Departures._of_this_run = Departures()


# How long a rank that failed because another one did leaves the agent to end it quietly.
CONSEQUENCE_WAIT_S = 2.0
# A connection to a rank that ended is lost sooner than its end is heard of.
DEPARTURE_WAIT_S = 1.0
# A failed rank whose teardown hangs (threads, communicators) is ended after this.
TEARDOWN_LIMIT_S = 3.0
# Handlers that others have registered with atexit get so long: trackers upload what they have.
HANDLERS_LIMIT_S = 60.0

# What shared memory, torch.distributed, gloo and NCCL say when a peer went away.
CONSEQUENCE_SIGNS = (
    "has ended, while rank",
    "aborted the process group",
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
    """Return whether an error only says that another rank failed or went away."""
    if getattr(error, "caused_by_rank", None) is not None:
        return True
    # Other libraries say the same of connections of their own.
    if not any(kind.__module__.startswith("torch") for kind in type(error).__mro__) and type(error) not in (
        RuntimeError,
        ConnectionResetError,
        BrokenPipeError,
    ):
        return False
    text = str(error).lower()
    return any(sign in text for sign in CONSEQUENCE_SIGNS)


def has_failed() -> bool:
    """Return whether this process ends because of an exception that nobody caught."""
    return getattr(sys, "last_value", None) is not None


def install_excepthook() -> None:
    """Say so where an uncaught exception is the loss of a rank that has ended; under an elastic agent, report any to
    it in torch's format."""
    path = error_file()
    if getattr(sys.excepthook, "reports_to_agent", False):
        return
    previous = sys.excepthook
    # Called after the handlers that scripts and trackers register from now on.
    atexit.register(end_within, TEARDOWN_LIMIT_S)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            # The launcher was interrupted, passed it on to all ranks, and says so once.
            return
        # torch gives an error in a callback of a backward as text.
        if lost := re.search(r"running the callback: DifferentCallsError: (.*)", str(error)):
            error = DifferentCallsError(lost[1])
        consequence = is_consequence(error)
        gone = departures().ranks(DEPARTURE_WAIT_S) if consequence else []
        sentence = ended_without(gone, call_in(traceback.walk_tb(trace))) if gone else None
        # It names the line of each rank: a traceback of each says nothing more.
        names_lines = isinstance(error, DifferentCallsError)
        if names_lines:
            sentence = str(error)
        if path is not None:
            _write_report(path, error, consequence and sentence is None, sentence)
            if consequence and sentence is None:
                _flush()
                time.sleep(CONSEQUENCE_WAIT_S)
        # Our launcher says at the end where the ranks were.
        is_shown = is_first_to_say(error, path) and not (
            names_lines and path is not None and shares_console()
        )
        if is_shown and not names_lines:
            previous(kind, error, trace)
        if is_shown and sentence is not None:
            sys.stderr.write(f"lockstep: {sentence}\n")
        if path is not None or sentence is not None:
            _flush()
            _limit_teardown()

    hook.reports_to_agent = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def is_first_to_say(error: BaseException, path: str | None) -> bool:
    """Return whether to show this traceback: where the ranks share a console, only the first of those that are
    equal."""
    if path is None or not shares_console():
        return True
    folder, name = os.path.split(path)
    # Beside the error files; "error.json" or "restart-1.error.json" says of which round.
    claim = os.path.join(folder, f"shown-{digest_of(error)}.{name.partition('.')[2]}")
    try:
        os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    except OSError:
        # The folder is gone with the launcher.
        return True
    return True


def digest_of(error: BaseException) -> str:
    """Equal where the traceback and the message are, to the letter; where all ranks are named, where the message is."""
    return hashlib.sha256(text_of(error).encode("utf-8", "replace")).hexdigest()[:16]


def text_of(error: BaseException) -> str:
    """Return its traceback and message; the message alone where that names the line of each rank."""
    if isinstance(error, DifferentCallsError):
        return str(error)
    return "".join(traceback.format_exception(error))


def ended_without(ranks: Sequence[int], call: UserCall) -> str:
    """Return the sentence for a call in which this rank alone is, since others have ended."""
    who = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    verb = "has" if len(ranks) == 1 else "have"
    name, line = call.name or "a collective", f" at {call.line}" if call.line else ""
    return (
        f"{name} must be called by every process, but {who} {verb} ended without entering the "
        f"call{line}. Call it on every rank, not on some of them, before any of them ends."
    )


def report_of(
    error: BaseException, consequence: bool, time_ns: int, sentence: str | None = None
) -> dict[str, object]:
    """Return the report: torch's fields, and ours under ``lockstep``."""
    return {
        "message": {
            "message": sentence or f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": text_of(error),
                "timestamp": str(time_ns // 1_000_000_000),
                "lockstep": {"consequence": consequence, "time_ns": time_ns, "digest": digest_of(error)},
            },
        }
    }


def _write_report(path: str, error: BaseException, consequence: bool, sentence: str | None = None) -> None:
    try:
        # Written aside and renamed: the agent never reads half a report.
        with open(path + ".part", "w") as file:
            json.dump(report_of(error, consequence, time.time_ns(), sentence), file)
        os.replace(path + ".part", path)
    except OSError as problem:
        # The traceback itself is still printed.
        sys.stderr.write(f"lockstep: cannot write the error report {path}: {problem}\n")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


_is_limited = False


def _limit_teardown() -> None:
    global _is_limited
    _is_limited = True
    end_within(TEARDOWN_LIMIT_S)
    # What is registered last is called first.
    atexit.register(end_within, HANDLERS_LIMIT_S)


def end_within(limit_s: float) -> None:
    """End this process, if it has failed, unless it is called again or has ended by then."""
    if _is_limited:
        # faulthandler's timer is a C thread, so it fires even when the interpreter is stuck while ending
        faulthandler.dump_traceback_later(limit_s, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
