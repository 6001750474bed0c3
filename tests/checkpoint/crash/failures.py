"""Let operations of a save fail as disks do: the save must say so, and nothing else may happen to the run."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoint.crash.crashes import Outcome, check, folder_for, leftovers
from checkpoint.crash.operations import Interposer, Operation
from checkpoint.crash.processes import Tell, run_ranks
from checkpoint.crash.subject import Scenario, Subject
from lockstep.errors import CheckpointError, LockstepError

CHANGES = ("open", "write", "truncate", "sync", "rename", "unlink", "mkdir", "rmdir")
Stop = Callable[[int, Operation, Interposer], "OSError | None"]


@dataclass(frozen=True)
class Failure:
    """Which operations fail, and how: one alone, or all of these kinds from it on, until the save has returned.

    ``code`` is that of ``errno``; 0: the folder with all checkpoints is deleted before the operation.
    """

    name: str
    code: int
    kinds: tuple[str, ...]
    lasts: bool = False


FAILURES = [
    Failure("disk full", errno.ENOSPC, ("open", "write", "mkdir"), lasts=True),
    Failure("disk full for a moment", errno.ENOSPC, ("open", "write", "mkdir")),
    Failure("read-only", errno.EROFS, ("open", "truncate", "rename", "unlink", "mkdir", "rmdir"), lasts=True),
    Failure("I/O error", errno.EIO, (*CHANGES, "read")),
    Failure("I/O errors", errno.EIO, (*CHANGES, "read"), lasts=True),
    Failure("folder deleted", 0, (*CHANGES, "read")),
]


@dataclass(frozen=True)
class Saved:
    """What a save that met a failure did on one rank. ``error``: what it raised, if it did.

    ``wrong``: what was not right afterwards in this process, as a result and its detail.
    """

    error: str
    is_explained: bool
    wrong: tuple[str, str] | None
    log: list[Operation]


def operations(scenario: Scenario, rank: int = 0) -> list[Operation]:
    """Those of the save that is to fail, on this rank, when nothing fails."""
    with folder_for() as folder:
        return _save(folder, scenario, rank, lambda number, operation, interposer: None)[rank].log


def fail(scenario: Scenario, failure: Failure, number: int, log: list[Operation], rank: int = 0) -> Outcome:
    """Let the last save of the scenario fail at this operation on ``rank``.

    The result is what ``check`` says of what was left; or ``mixed`` (some ranks raised), ``vague`` (the error is no
    CheckpointError that names place, rank and remedy), ``disturbed`` (the run's state changed), ``stuck`` (its next
    save failed) or ``leftovers``.
    """

    def stop(at: int, operation: Operation, interposer: Interposer) -> OSError | None:
        if at < number or (at > number and not failure.lasts) or operation.kind not in failure.kinds:
            return None
        if failure.code:
            return OSError(failure.code, os.strerror(failure.code), operation.path)
        interposer.armed = False
        for inner in interposer.root.iterdir():
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
        interposer.armed = True
        return None

    name, point = f"{scenario.name}, {failure.name}", f"rank {rank}, at operation {number}: {log[number]}"
    with folder_for() as folder:
        try:
            saved = _save(folder, scenario, rank, stop)
        except AssertionError as error:
            return Outcome(name, point, "stuck", str(error))
        if len({bool(one.error) for one in saved}) > 1:
            return Outcome(name, point, "mixed", f"ranks differ: {[one.error for one in saved]}")
        step = scenario.saves
        allowed = {step, step - 1} if saved[rank].error else {step}
        allowed |= {0} if not failure.code else set()
        outcome = check(folder / "left", scenario, frozenset(allowed), point)
        result, detail = outcome.result, outcome.detail
        named = failure.code == 0 or all(f"Rank {rank} " in one.error for one in saved if one.error)
        if outcome.is_right and not (named and all(one.is_explained for one in saved)):
            result, detail = "vague", str([one.error for one in saved])
        result, detail = next((one.wrong for one in saved if one.wrong), (result, detail))
        return Outcome(name, point, result, detail)


def _save(folder: Path, scenario: Scenario, rank: int, stop: Stop) -> list[Saved]:
    run, left = folder / "run", folder / "left"
    run.mkdir()

    def work(this_rank: int, tell: Tell) -> None:
        os.sched_getaffinity = lambda process: set(range(scenario.cores))
        interposer = Interposer(
            run, lambda number, operation: stop(number, operation, interposer), with_reads=True
        )
        interposer.install()
        subject = Subject(run, scenario)
        for _ in range(scenario.saves - 1):
            subject.advance()
            subject.save()
        subject.advance()
        interposer.armed = this_rank == rank
        error: Exception | None = None
        try:
            subject.save()
        except Exception as raised:
            error = raised
        interposer.armed = False
        subject.accelerator.wait_for_everyone()
        if this_rank == 0:
            shutil.copytree(run, left)
        subject.accelerator.wait_for_everyone()
        message = "" if error is None else f"{type(error).__name__}: {error}"
        is_explained = error is None or _is_explained(error)
        tell(Saved(message, is_explained, _go_on(subject, run), interposer.log))

    return [ended.reported[0] for ended in run_ranks(work, scenario.ranks)]


def _go_on(subject: Subject, run: Path) -> tuple[str, str] | None:
    """The state is what it was; the next save succeeds, and removes what the failed one left."""
    step, steps = subject.scenario.saves, subject.steps()
    if set(steps.values()) != {step}:
        return "disturbed", str(steps)
    if complaint := subject.saves_and_loads(step + 1):
        return "stuck", complaint
    return ("leftovers", ", ".join(leftovers(run))) if leftovers(run) else None


def _is_explained(error: Exception) -> bool:
    """Whether an error names place, rank and remedy. Other ranks than that which failed quote it."""
    text = str(error)
    quoted = isinstance(error, LockstepError) and re.match(
        r"Rank \d failed in \w+ with \w*CheckpointError: ", text
    )
    names_place = re.search(r"/run/(state|project)", text) is not None
    names_rank = re.search(r"\bRank \d", text) is not None
    has_remedy = re.search(r"[.;:] \w", text.split("Errno")[-1]) is not None
    return (
        (isinstance(error, CheckpointError) or quoted is not None)
        and names_place
        and names_rank
        and has_remedy
    )
