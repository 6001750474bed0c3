"""Load damaged checkpoints, and record what the run saw of it: shared by the tests and the benchmark."""

from __future__ import annotations

import logging
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from checkpoint.damage import damage
from checkpoint.subject import Subject
from lockstep.errors import CheckpointError, LockstepError


@dataclass(frozen=True)
class Outcome:
    """What became of one damaged checkpoint, on one rank.

    ``detected``: ``load_state`` of this directory raised CheckpointError, and nothing had been written.
    ``named``: the error named a file that was damaged.
    ``fell_back``: without a directory it warned once, nothing written by then, and restored the older one exactly.
    """

    kind: str
    seed: int
    detected: bool
    named: bool
    fell_back: bool
    message: str

    @property
    def is_right(self) -> bool:
        return self.detected and self.named and self.fell_back


class Bench:
    """A run with two good checkpoints, of which the newest is damaged again and again.

    Every rank makes one, and calls ``trial`` with the same arguments.
    """

    def __init__(self, folder: Path) -> None:
        project, self._pristine = folder / "project", folder / "pristine"
        self._subject = Subject(project)
        older = self._subject.train_and_save(steps=2)
        self._at_older = self._subject.fingerprint()
        newest = self._subject.train_and_save(steps=3)
        self._checkpoints, self._older, self._newest = older.parent, older.name, newest.name
        if self._is_first:
            shutil.copytree(self._checkpoints, self._pristine)
        self._subject.accelerator.wait_for_everyone()

    def trial(self, kind: str, seed: int) -> Outcome:
        """Damage the newest checkpoint in this way, and load it: by its name, then whatever is newest and whole."""
        accelerator, names = self._subject.accelerator, ()
        accelerator.wait_for_everyone()
        if self._is_first:
            shutil.rmtree(self._checkpoints)
            shutil.copytree(self._pristine, self._checkpoints)
            newest, older = self._checkpoints / self._newest, self._checkpoints / self._older
            names = damage(kind, random.Random(f"{kind} {seed}"), newest, older).names
        accelerator.wait_for_everyone()
        detected, message = self._load_by_name(seed)
        fell_back = self._load_newest(seed)
        named = not self._is_first or any(name in message for name in names)
        return Outcome(kind, seed, detected, named, fell_back, message)

    def check_the_newest_loads(self) -> None:
        """An intact checkpoint must load, or all the rest proves nothing."""
        self._subject.scramble(0)
        before = self._subject.fingerprint()
        assert self._subject.accelerator.load_state() == str(self._checkpoints / self._newest)
        assert all(
            self._subject.fingerprint()[part] != before[part] for part in ("weights", "optimizer", "torch")
        )

    @property
    def _is_first(self) -> bool:
        return self._subject.accelerator.is_main_process

    def _state(self) -> dict[str, str]:
        return {**self._subject.fingerprint(), **self._subject.writes()}

    def _load_by_name(self, seed: int) -> tuple[bool, str]:
        self._subject.scramble(seed)
        before = self._state()
        try:
            self._subject.accelerator.load_state(str(self._checkpoints / self._newest))
        except LockstepError as error:  # on another rank than that which found it, one that quotes it
            refused = isinstance(error, CheckpointError) or " failed with CheckpointError: " in str(error)
            return refused and self._state() == before, str(error)
        return False, "(loaded)"

    def _load_newest(self, seed: int) -> bool:
        self._subject.scramble(seed)
        before = self._state()
        warnings: list[tuple[str, bool]] = []

        class Listener(logging.Handler):
            def emit(_, record: logging.LogRecord) -> None:
                warnings.append((record.getMessage(), self._state() == before))

        logger, listener = logging.getLogger("lockstep.checkpoint"), Listener()
        logger.addHandler(listener)
        propagate, logger.propagate = logger.propagate, False
        try:
            loaded = self._subject.accelerator.load_state()
        except LockstepError:
            return False
        finally:
            logger.removeHandler(listener)
            logger.propagate = propagate
        refused = [untouched for text, untouched in warnings if text.startswith("Skipped")]
        as_it_should = refused == [True] if self._is_first else not refused
        return (
            as_it_should
            and loaded == str(self._checkpoints / self._older)
            and self._subject.fingerprint() == self._at_older
        )
