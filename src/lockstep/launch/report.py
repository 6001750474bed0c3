"""What failures mean: which rank is to blame, what to say, and whether another round follows.

It reads the error files that ranks have left, and nothing else.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
    def own(self) -> Mapping[str, object]:
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
    """Return the data of a worker's error file; empty when it wrote none, as with most failures."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) and isinstance(data.get("message"), dict) else {}


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(failures: list[Failure]) -> Failure:
    """Return the root cause: not a consequence of another rank's end, not ended by us, earliest, lowest rank."""

    def order(failure: Failure) -> tuple[bool, bool, int, int]:
        consequence = bool(failure.own.get("consequence"))
        # A worker that was killed leaves no report, and is the cause of whatever the others report after it.
        return failure.ended_by_us, consequence, int(str(failure.own.get("time_ns", 0))), failure.rank

    return min(failures, key=order)


def exit_code(failure: Failure) -> int:
    """Return the launcher's exit code: the rank's own, or 128 + signal as shells do."""
    return 128 - failure.exit_code if failure.exit_code < 0 else failure.exit_code


def count_alike(failure: Failure, failures: list[Failure]) -> int:
    """Return how many ranks failed with the same traceback to the letter, this one among them."""
    digest = failure.own.get("digest")
    return sum(one.own.get("digest") == digest for one in failures) if digest else 1


def describe_failure(failure: Failure, num_processes: int, num_alike: int = 1) -> str:
    """Return what the launcher prints at the end. A traceback is included only if it went to a log file.

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
        lines.append(f"lockstep: {who} failed alike ({failure.summary}).")
    else:
        lines.append(f"lockstep: rank {failure.rank} failed first ({failure.summary}){others}.")
    if failure.own.get("consequence"):
        lines.append(
            "It only lost the connection to another rank, which has left no error here. Look how that rank "
            "ended, on another machine if there are several."
        )
    if failure.exit_code == -signal.SIGKILL:
        lines.append(
            "SIGKILL without an error usually means that the system ran out of memory (see dmesg), or that a "
            "person ended the process."
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


STALLED_ROUNDS = 3


@dataclass(frozen=True)
class Decision:
    """``again``: form another round. ``sentence``: what to tell people; may be empty where the run ends."""

    again: bool
    sentence: str


class Restarts:
    """Counts rounds that failed.

    Args:
        most: how many failures are followed by another round.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._commits: int | None = 0
        self._stalled = 0
        self.done = 0

    def round_started(self, commits: int | None) -> None:
        """Begin a round; ``commits``: checkpoints so far in this launch; None where nobody counts them."""
        self._commits = commits

    def round_failed(self, cause: str, commits: int | None) -> Decision:
        """Return what follows a round that failed because of ``cause`` (a clause such as ``rank 1 failed (...)``)."""
        # Not known is not the same as none.
        stalled = commits is not None and self._commits is not None and commits <= self._commits
        self._stalled = self._stalled + 1 if stalled else 0
        if self.done >= self._most:
            used = f"All {self._most} restarts were used." if self._most > 1 else "The one restart was used."
            return Decision(False, used if self._most else "")
        if self._stalled >= STALLED_ROUNDS:
            return Decision(
                False,
                f"{STALLED_ROUNDS} rounds in a row ended without a new checkpoint, so another restart would not "
                f"help. Find the cause first, or save more often.",
            )
        self.done += 1
        return Decision(True, f"restart {self.done} of {self._most}: {cause}; resuming")
