"""Kill a run at an operation of a save, and see what a fresh process makes of what is left."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from checkpoint.crash.operations import Interposer, Kill, Operation, Stop
from checkpoint.crash.processes import GRACE_S, Ended, Tell, run_ranks
from checkpoint.crash.subject import Scenario, Subject
from lockstep.errors import NoCheckpointError

UNFINISHED = (".partial", ".old", ".removed")

Allowed = frozenset[int]
"""Steps of which one must be loaded: the last that was saved, and the one that was being saved. 0: there is none."""


@dataclass(frozen=True)
class Point:
    """Where a run is killed: before its operation ``number``, or in the middle of it, if that is a write.

    After an operation is before the next one: no file differs. ``rank`` is killed; the others a moment later,
    or ``at_once``.
    """

    number: int
    half: bool = False
    rank: int = 0
    at_once: bool = False


@dataclass(frozen=True)
class Written:
    """What a run did, on one rank. ``log`` is there if it came to its end; ``ends[i]`` is how long the log was when
    save ``i`` had returned. Steps: ``loaded`` at first, the last that was ``started`` and that ``returned``."""

    log: list[Operation]
    ends: list[int]
    loaded: int
    started: int
    returned: int
    killed: bool


@dataclass(frozen=True)
class Outcome:
    """What became of one point.

    ``N``: the save that was interrupted is loaded; ``N-1``: the one before it; ``none``: there had been none, and
    that is said. All else is a failure: ``unreadable``, ``mixed``, another step (``wrong``), ``stuck`` (the next save
    failed) or ``leftovers`` (it left files of the crash).
    """

    scenario: str
    point: str
    result: str
    detail: str = ""

    @property
    def is_right(self) -> bool:
        return self.result in ("N", "N-1", "none")


def write(
    folder: Path, scenario: Scenario, point: Point | None = None, saves: int = 0, resume: bool = False
) -> list[Written]:
    """Train and save ``saves`` times (0: as often as the scenario says), in processes that ``point`` ends."""

    def work(rank: int, tell: Tell) -> None:
        def stop(number: int, operation: Operation) -> Kill | None:
            if point is None or rank != point.rank or number != point.number:
                return None
            return Kill(point.half)

        run_and_save(folder, scenario, saves or scenario.saves, resume, stop, tell)

    grace_s = 0.0 if point is not None and point.at_once else GRACE_S
    return [_written(ended) for ended in run_ranks(work, scenario.ranks, grace_s)]


def run_and_save(folder: Path, scenario: Scenario, saves: int, resume: bool, stop: Stop, tell: Tell) -> None:
    """What a training does, in this process: load if it is to, and save after each step."""
    os.sched_getaffinity = lambda process: set(range(scenario.cores))
    interposer = Interposer(folder, stop)
    interposer.install()
    subject = Subject(folder, scenario)
    interposer.armed = True
    if resume:
        with suppress(NoCheckpointError):
            subject.load()
        tell(("loaded", subject.step))
    for _ in range(saves):
        subject.advance()
        tell(("started", subject.step))
        subject.save()
        tell(("returned", subject.step, len(interposer.log)))
    subject.accelerator.end_training()
    tell(("log", interposer.log))


def _written(ended: Ended) -> Written:
    reported = [(*item, None)[:3] for item in ended.reported]
    steps = dict.fromkeys(("loaded", "started", "returned"), 0)
    steps.update({name: value for name, value, _ in reported if name in steps})
    steps["returned"] = steps["returned"] or steps["loaded"]
    steps["started"] = steps["started"] or steps["loaded"]
    log: list[Operation] = next((value for name, value, _ in reported if name == "log"), [])
    return Written(
        log, [end for name, _, end in reported if name == "returned"], **steps, killed=bool(ended.code)
    )


def check(folder: Path, scenario: Scenario, allowed: Allowed, point: str) -> Outcome:
    """Load what is there in fresh processes, train on, save and load that."""

    def work(rank: int, tell: Tell) -> None:
        os.sched_getaffinity = lambda process: set(range(scenario.cores))
        tell(_result(Subject(folder, scenario), allowed))

    try:
        ended = run_ranks(work, scenario.ranks)
    except AssertionError as error:
        return Outcome(scenario.name, point, "stuck", str(error))
    results = {one.reported[0] for one in ended}
    result, detail = results.pop() if len(results) == 1 else ("mixed", f"ranks differ: {results}")
    if result in ("N", "N-1", "none") and (left := leftovers(folder)):
        result, detail = "leftovers", ", ".join(left)
    return Outcome(scenario.name, point, result, detail)


def _result(subject: Subject, allowed: Allowed) -> tuple[str, str]:
    try:
        subject.load()
    except NoCheckpointError as error:
        if 0 not in allowed:
            return "unreadable", str(error)
        result, step = "none", subject.step
        subject.next_rows()
    except Exception as error:
        return "unreadable", f"{type(error).__name__}: {error}"
    else:
        steps = subject.steps()
        if len(set(steps.values())) != 1 or None in steps.values():
            return "mixed", str(steps)
        step = subject.step
        if step not in allowed:
            return "wrong", f"step {step} was loaded, none of {sorted(allowed)}"
        result = "N" if step == max(allowed) else "N-1"
    complaint = subject.saves_and_loads(step + 1)
    return ("stuck", complaint) if complaint else (result, "")


def leftovers(folder: Path) -> list[str]:
    """What of unfinished saves and removals is below the folder."""
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith(UNFINISHED)
    )


def points_of(log: list[Operation], first: int = 0, rank: int = 0) -> list[Point]:
    """All points from operation ``first`` on. Before an operation that fails is before the next: it is no point."""
    points = []
    for number, operation in enumerate(log):
        if number >= first and not operation.failed:
            points.append(Point(number, rank=rank))
            if operation.kind == "write" and len(operation.data) > 1:
                points.append(Point(number, half=True, rank=rank))
    return points


def crash(scenario: Scenario, point: Point, log: list[Operation]) -> Outcome:
    """Save again and again in an empty folder until ``point``; ``log`` is that of a run that was left alone."""
    with folder_for() as folder:
        written = write(folder, scenario, point)
        return check(folder, scenario, _allowed(written), _named(point, log))


def _allowed(written: list[Written]) -> Allowed:
    """The last step that was saved, as some rank was told, and the one that was being saved."""
    return frozenset([max(one.returned for one in written), max(one.started for one in written)])


def _named(point: Point, log: list[Operation]) -> str:
    operation = log[point.number] if point.number < len(log) else "the end"
    where = "in the middle of" if point.half else "before"
    return f"rank {point.rank}, {where} operation {point.number}: {operation}"


@contextmanager
def folder_for() -> Iterator[Path]:
    """A folder in memory, if there is one: what a killed process leaves does not depend on the medium."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="crash-", dir=place) as folder:
        yield Path(os.path.realpath(folder))
