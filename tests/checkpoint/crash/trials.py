"""The table of trials, and processes to make them in: shared by the tests and the benchmark."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext

import torch

from checkpoint.crash.crashes import Outcome, crash, folder_for, points_of, write
from checkpoint.crash.failures import FAILURES, fail, operations
from checkpoint.crash.power_failures import (
    after_kills,
    after_one_kill,
    after_one_run,
    after_two_kills,
    allowed_in,
    load,
)
from checkpoint.crash.processes import Tell, run
from checkpoint.crash.subject import Scenario, Subject, known_seeds

LIMIT_1 = Scenario("total_limit=1", limit=1)
EXPLICIT = Scenario("one directory", explicit=True)
BACKGROUND = Scenario("in the background", limit=1, blocking=False)
HOOKS = Scenario("hook that writes files", explicit=True, hooks=True)
THREADS = Scenario("four threads", limit=1, cores=4)
RANKS = Scenario("two ranks", explicit=True, ranks=2, saves=2)
RANKS_NUMBERED = Scenario("two ranks, total_limit=1", limit=1, ranks=2, saves=2)

Slice = tuple[int, int]
"""Every so many-th of the points, and which of them is the first."""


def killed(scenario: Scenario, part: Slice) -> list[Outcome]:
    """Killed at any point of the first save ever and of those after it."""
    return [load(scenario, left) for left in after_one_kill(scenario)[part[1] :: part[0]]]


def really_killed(scenario: Scenario, part: Slice) -> list[Outcome]:
    """The same by a signal; each rank in turn, every other time the rest of the ranks with it."""
    with folder_for() as folder:
        written = write(folder, scenario)
    points = [point for rank, one in enumerate(written) for point in points_of(one.log, rank=rank)]
    if scenario.ranks > 1:
        points = [replace(point, at_once=i % 2 == 1) for i, point in enumerate(points)]
    return [crash(scenario, point, written[point.rank].log) for point in points[part[1] :: part[0]]]


def killed_twice(scenario: Scenario, part: Slice) -> list[Outcome]:
    """Killed in the last save; the process that resumes is killed too, at every 16th point, each time others."""
    with folder_for() as folder:
        (written,) = write(folder, scenario)
    lefts = after_kills(written.log, allowed_in(written), first=written.ends[-2])
    return [
        load(scenario, one)
        for first in lefts[part[1] :: part[0]]
        for one in after_two_kills(scenario, written, first)[first.number % 16 :: 16]
    ]


def power_off(scenario: Scenario, part: Slice) -> list[Outcome]:
    """The power fails: whatever was not synced may be lost."""
    return [load(scenario, left) for left in after_one_run(scenario)[part[1] :: part[0]]]


def failed(scenario: Scenario, part: Slice) -> list[Outcome]:
    """Operations of the last save fail, on every rank in turn."""
    outcomes = []
    for rank in range(scenario.ranks):
        log = operations(scenario, rank)
        cases = [
            (failure, i) for failure in FAILURES for i, one in enumerate(log) if one.kind in failure.kinds
        ]
        outcomes += [fail(scenario, failure, i, log, rank) for failure, i in cases[part[1] :: part[0]]]
    return outcomes


@dataclass(frozen=True)
class Trial:
    """One row of the table."""

    kind: Callable[[Scenario, Slice], list[Outcome]]
    scenario: Scenario

    @property
    def name(self) -> str:
        return f"{self.kind.__name__.replace('_', ' ')}: {self.scenario.name}"


TRIALS = [
    *(Trial(killed, s) for s in (LIMIT_1, EXPLICIT, BACKGROUND, HOOKS, THREADS)),
    *(Trial(really_killed, s) for s in (BACKGROUND, RANKS, RANKS_NUMBERED)),
    *(Trial(killed_twice, s) for s in (LIMIT_1, EXPLICIT, BACKGROUND)),
    *(Trial(power_off, s) for s in (LIMIT_1, EXPLICIT, HOOKS)),
    *(Trial(failed, s) for s in (LIMIT_1, EXPLICIT, BACKGROUND, RANKS)),
]


def pool(context: BaseContext, workers: int = 2) -> ProcessPoolExecutor:
    """Processes that have imported all that a run needs; each trial forks children of one of them."""
    return ProcessPoolExecutor(workers, context, initializer=warm_up)


def make(
    executor: ProcessPoolExecutor, trials: list[Trial], slices: int, taken: int
) -> Iterator[tuple[Trial, list[Outcome]]]:
    """Cut the points of each trial into ``slices`` and make ``taken`` of these, each trial beginning with another."""
    waiting = {
        executor.submit(trial.kind, trial.scenario, (slices, (number + i) % slices)): trial
        for i in range(taken)
        for number, trial in enumerate(trials)
    }
    for done in as_completed(waiting):
        yield waiting[done], done.result()


def warm_up() -> None:
    """Import in this process all that a run needs, so that its children have it. Nothing runs here."""
    torch.set_num_threads(1)

    def work(tell: Tell) -> None:
        with folder_for() as folder:
            scenario = Scenario("warm-up", explicit=True, saves=1)
            subject = Subject(folder, scenario)
            subject.advance()
            subject.save()
            subject.load()
        tell(sorted(sys.modules))

    for name in run(work).reported[0]:
        if name != "__main__" and name not in sys.modules:
            with suppress(ImportError):  # a name that another module made up
                importlib.import_module(name)
    known_seeds()
    logging.disable()  # what is skipped and why: thousands of lines
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()
