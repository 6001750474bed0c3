"""One input, read by what is tested, and judged."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from tests.config.fuzzing import files
from tests.config.fuzzing.pools import Input
from tests.config.fuzzing.readers import READERS, SECRET, read_command, run

LIMIT_S = 1.0  # of processor time, which other processes do not lengthen
WAITING_S = 5.0
HUNG_S = 20
FILES = {"YAML": "in.yaml", "JSON": "in.json", "hostfile": "hosts"}


@dataclass(frozen=True)
class Outcome:
    """``failure`` says what went wrong, with what is needed to see it again.

    ``seconds`` are of processor time, ``waited_s`` by the clock.
    """

    kind: str
    accepted: bool
    seconds: float
    waited_s: float
    failure: str | None = None


class Hung(BaseException):
    """An input took far too long."""


MAKERS: tuple[Callable[[random.Random], Input], ...] = (
    files.damaged_yaml,
    files.changed_yaml,
    files.damaged_json,
)


@contextmanager
def sandbox(folder: Path) -> Iterator[None]:
    """An empty folder to work in, and an environment with nothing of ours."""
    before, where = dict(os.environ), os.getcwd()
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
    try:
        os.environ.clear()
        os.environ.update(
            kept, HOME=str(folder), LOCKSTEP_SECRET=SECRET, XDG_CONFIG_HOME=str(folder / "xdg"), COLUMNS="100"
        )
        os.chdir(folder)
        Path("train.py").write_text("print('never run')\n")
        Path("folder").mkdir()
        yield
    finally:
        os.chdir(where)
        os.environ.clear()
        os.environ.update(before)


def warm_up() -> None:
    """Import what the first input of its kind would have to wait for."""
    for argv in (
        ["config", "--yes", "--force", "--config-file", "warm.yaml"],
        ["launch", "--dry-run", "--nproc", "1", "train.py"],
        ["launch", "--dry-run", "--hosts", "a", "--nproc", "1", "train.py"],
        ["launch", "--dry-run", "--cpu", "train.py"],
    ):
        run(argv)
    import torch

    torch.cuda.device_count()


def trial(given: Input) -> Outcome:
    """Read an input inside a :func:`sandbox`, and judge what became of it."""
    content = given.content
    for name in ("in.yaml", "in.json", "hosts", "folder/file"):
        Path(name).write_bytes(content)
    previous = signal.signal(signal.SIGALRM, _hung)
    signal.setitimer(signal.ITIMER_REAL, HUNG_S)
    started, worked = time.perf_counter(), time.process_time()
    accepted, failure = False, None
    try:
        accepted, failure = READERS.get(given.kind, read_command)(given)
    except ConfigError as error:
        failure = _complaint_about_message(str(error), given.kind)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = "".join(traceback.format_tb(error.__traceback__)[-3:])
        failure = f"{type(error).__name__}: {str(error)[:200]}\n{frames}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    seconds, waited_s = time.process_time() - worked, time.perf_counter() - started
    if failure is None and accepted and given.wrong:
        failure = "nonsense was accepted"
    if failure is None and (seconds > LIMIT_S or waited_s > WAITING_S):
        failure = f"took {seconds:.1f} s of processor time, {waited_s:.1f} s in all"
    if failure is not None:
        shown = given.argv or given.content[:1500]
        failure = f"{given.kind}: {failure}\n{shown!r:.2500}"
    return Outcome(given.kind, accepted, seconds, waited_s, failure)


def _hung(*_: Any) -> None:
    raise Hung(f"no end after {HUNG_S} s")


def _complaint_about_message(text: str, kind: str) -> str | None:
    """Of what is raised: one short line, which names the file, if there is one."""
    if not text or len(text) > 500:
        return f"a message of {len(text)} characters"
    if not text.isprintable():
        return f"control characters in the message {text[:300]!r}"
    file = next((name for end, name in FILES.items() if kind.endswith(end)), "")
    return None if file in text else f"{file} is not named in the message {text[:300]!r}"
