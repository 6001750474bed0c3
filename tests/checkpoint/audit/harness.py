"""Runs trials on the worker pool: the leg up to the stop, the one from there, and the run without a stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

from checkpoint.audit.judge import Verdict, judge
from checkpoint.audit.run import from_the_newest, uninterrupted, until_killed, until_the_stop
from checkpoint.audit.trials import Trial
from lockstep.testing import DistributedTestError, WorkerPool

Run = Callable[..., list[Any]]
Job = tuple[Trial, Path]


def examine(run: Run, trials: Sequence[Trial], folder: Path) -> list[Verdict]:
    """The verdicts on trials that stop by themselves, all of the same numbers of ranks.

    ``run(function, world_size, ...)``: as ``WorkerPool.run``.
    """
    jobs = [(trial, new_folder(folder)) for trial in trials]
    run(on_each, trials[0].before, until_the_stop, jobs)
    return resumed(run, jobs)


def examine_killed(pool: WorkerPool, trial: Trial, folder: Path) -> Verdict:
    """The verdict on a trial whose processes are killed."""
    job = (trial, new_folder(folder))
    pool.ready(trial.before)
    is_over = Event()
    killer = Thread(target=kill_after_a_save, args=(pool, *job, is_over))
    killer.start()
    try:
        pool.run(until_killed, trial.before, *job)
    except DistributedTestError as error:
        if "exit code -9" not in str(error):  # another failure came first
            raise
    finally:
        is_over.set()
        killer.join()
        replace_workers(pool)
    return resumed(pool.run, [job])[0]


def resumed(run: Run, jobs: list[Job], leg: Callable[[Trial, Path], Any] = from_the_newest) -> list[Verdict]:
    """Go on by ``leg`` where the jobs' runs stopped, and judge that."""
    first = jobs[0][0]
    references = run(on_each, first.after, uninterrupted, jobs) if first.same_world else None
    finals = run(on_each, first.after, leg, jobs)
    return [
        judge(
            trial,
            folder,
            [of_rank[i] for of_rank in finals],
            None if references is None else [of_rank[i] for of_rank in references],
        )
        for i, (trial, folder) in enumerate(jobs)
    ]


def on_each(leg: Callable[[Trial, Path], Any], jobs: list[Job]) -> list[Any]:
    """On one rank."""
    return [leg(trial, folder) for trial, folder in jobs]


def kill_after_a_save(pool: WorkerPool, trial: Trial, folder: Path, is_over: Event) -> None:
    """End the workers and their loaders' processes, at a moment after one of the checkpoints was published."""
    number = trial.seed % 4
    while all(int(path.parent.name.rpartition("_")[2]) < number for path in published(folder)):
        if is_over.wait(0.001):
            return
    time.sleep(trial.kill_after or 0.0)
    for worker in pool.workers[: trial.before]:
        os.killpg(worker.pid, signal.SIGKILL)


def published(folder: Path) -> list[Path]:
    """Manifests under final names: a staging directory's ends in ``.partial``."""
    return [path for path in folder.glob("checkpoints/*/manifest.json") if path.parent.name[-1].isdigit()]


def replace_workers(pool: WorkerPool) -> None:
    """All of them: torch remembers the shapes of shards, and a process that lived on would change its rank."""
    for worker in pool.workers:
        worker.kill()
    pool.workers = []


def new_folder(folder: Path) -> Path:
    new = folder / str(len(list(folder.iterdir())))
    new.mkdir()
    return new
