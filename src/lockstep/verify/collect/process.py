"""One process of a run: its facts, the sink of its tensors, and its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from lockstep.parallel.parallel_model import ParallelModel
from lockstep.verify.collect.collector import RunCollector
from lockstep.verify.collect.disturb import disturb_inputs, disturb_weights
from lockstep.verify.collect.plain_calls import keep_gradients
from lockstep.verify.collect.virtual_ranks import VirtualRanks
from lockstep.verify.judge.tolerance import Tolerance
from lockstep.verify.spec import ProcessFacts, Role, RunSpec
from lockstep.verify.trace.file import Trace
from lockstep.verify.trace.sinks import Recording, Sink, TraceComparison


class ProcessRun(RunCollector):
    """Collects what a specification asks for.

    Args:
        rank: Of this process, as the launcher says; 0 where it is alone.

    Attributes:
        instead: What to do where one process cannot stand for several ranks.
        restores: What undoes changes of classes, for a process that lives on.
    """

    instead = "Compare with several processes instead: --reference ddp."

    def __init__(self, spec: RunSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._facts = ProcessFacts(rank=rank, seed=spec.seed, steps_asked=spec.steps)
        self.restores: list[Callable[[], None]] = []
        super().__init__(_sink(spec, rank), spec.steps, self.all_steps_made)

    def model_prepared(self, model: ParallelModel) -> None:
        if self._spec.role is Role.DISTURBED:
            disturb_weights(model.plain)
            model.module.register_forward_pre_hook(disturb_inputs, with_kwargs=True)
        if self.place.has_all_ranks:
            keep_gradients(model.module, self.place)
        super().model_prepared(model)

    def note(self, sentence: str) -> None:
        """Have the report say it."""
        if sentence not in self._facts.notes:
            self._facts = replace(self._facts, notes=(*self._facts.notes, sentence))

    def _data_ended(self, how: str) -> NoReturn:
        self._facts = replace(self._facts, ended=f"an epoch ends there with {how}")
        self.end()

    def refuse(self, why: str, instead: str | None = None) -> NoReturn:
        """Refuse to let one process stand for several ranks here: the check has no answer, but this sentence.

        Args:
            instead: What to do; None: what helps every script of this kind.
        """
        self._facts = replace(self._facts, refused=f"{why} {instead or self.instead}")
        self.end()

    def all_steps_made(self, made: int) -> None:
        """Come to the end of the run."""
        self.end()

    def fail(self, error: BaseException) -> None:
        """Leave what was found until the script raised ``error``."""
        self._facts = replace(self._facts, failed=f"{type(error).__name__}: {error}".strip().splitlines()[0])
        self.finish()

    def finish(self) -> None:
        """Leave what was found."""
        place = self.place
        sets_rate = isinstance(place, VirtualRanks) and not place.schedulers_asked and self.rates_changed
        facts = replace(self._facts, made=self.made, sets_rate=sets_rate, draws=place.draws)
        self._sink.close(facts.to_json())
        facts.write(Path(self._spec.folder))

    def end(self) -> NoReturn:
        """Leave what was found, and end this process: other ranks may do without it, as none is in a collective."""
        self.finish()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _sink(spec: RunSpec, rank: int) -> Sink:
    folder = Path(spec.folder)
    if spec.trace is None:
        return Recording(folder / f"trace-{rank}.safetensors")
    allowed = None if spec.allowed is None else Tolerance.read(Path(spec.allowed))
    return TraceComparison(Trace(Path(spec.trace)), folder, rank, allowed)
