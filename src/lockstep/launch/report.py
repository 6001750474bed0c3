"""Which rank failed first, and what to say about it. Failures in, text and exit code out."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAIL_LINES = 30
TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Failure:
    """How one worker ended. ``report`` is the data of its error file, empty when it wrote none.

    ``ended_by_us``: the launcher ended it after another one's failure.
    """

    rank: int
    exit_code: int
    report: Mapping[str, object]
    stderr_file: str | None = None
    ended_by_us: bool = False

    @property
    def details(self) -> Mapping[str, object]:
        message = self.report.get("message")
        extra = message.get("extraInfo") if isinstance(message, dict) else None
        return extra if isinstance(extra, dict) else {}

    @property
    def own(self) -> Mapping[str, Any]:
        ours = self.details.get("lockstep")
        return ours if isinstance(ours, dict) else {}

    @property
    def summary(self) -> str:
        """``ValueError: ...`` on one line, or the signal, or the exit code."""
        message = self.report.get("message")
        if isinstance(message, dict) and message.get("message"):
            first = str(message["message"]).strip().splitlines()[0]
            return first if len(first) <= 200 else first[:197] + "..."
        if self.exit_code < 0:
            return f"ended by {signal_name(-self.exit_code)}"
        return f"exit code {self.exit_code}"


def read_error_file(path: str | Path) -> Mapping[str, object]:
    """The data of a worker's error file; empty when it wrote none, as with most failures."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) and isinstance(data.get("message"), dict) else {}


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(failures: list[Failure]) -> Failure:
    """The root cause: not a consequence of another rank's end, not ended by us, earliest, lowest rank."""

    def order(failure: Failure) -> tuple[bool, bool, int, int]:
        consequence = bool(failure.own.get("consequence"))
        # a worker that was killed leaves no report, and is the cause of whatever the others report after it
        return failure.ended_by_us, consequence, int(failure.own.get("time_ns", 0)), failure.rank

    return min(failures, key=order)


def exit_code(failure: Failure) -> int:
    """The launcher's exit code: the rank's own, or 128 + signal as shells do."""
    return 128 - failure.exit_code if failure.exit_code < 0 else failure.exit_code


def count_alike(failure: Failure, failures: list[Failure]) -> int:
    """How many ranks failed with the same traceback to the letter, this one among them."""
    digest = failure.own.get("digest")
    return sum(one.own.get("digest") == digest for one in failures) if digest else 1


def describe_failure(failure: Failure, num_processes: int, num_alike: int = 1) -> str:
    """What the launcher prints at the end. A traceback is included only if it went to a log file.

    ``num_alike``: ranks of this machine that failed with the same traceback, this one included.
    """
    lines = []
    if failure.stderr_file is not None:
        lines += _traceback(failure)
    others = "" if num_processes == 1 else "; the other process was ended"
    if num_processes > 2:
        others = f"; the other {num_processes - 1} processes were ended"
    if num_alike > 1:
        who = (
            f"all {num_alike} ranks"
            if num_alike == num_processes
            else f"{num_alike} of {num_processes} ranks"
        )
        lines.append(f"lockstep launch: {who} failed alike ({failure.summary}).")
    else:
        lines.append(f"lockstep launch: rank {failure.rank} failed first ({failure.summary}){others}.")
    if failure.own.get("consequence"):
        lines.append(
            "It only lost contact with another rank, which has left no error here; see how that one ended, on another "
            "machine if there are several."
        )
    if failure.exit_code == -signal.SIGKILL:
        lines.append(
            "SIGKILL without an error is usually the system's lack of memory (see dmesg) or a person."
        )
    if failure.stderr_file is not None:
        lines.append(f"Its output is in {failure.stderr_file}.")
    return "\n".join(lines)


def _traceback(failure: Failure) -> list[str]:
    stack = failure.details.get("py_callstack")
    if stack:
        return str(stack).rstrip().splitlines()
    try:
        with Path(failure.stderr_file or "").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []
