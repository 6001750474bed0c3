"""What a run does, measured in every step: where its time goes, and how much it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.history.goodput import Goodput, goodput_of
from lockstep.history.read import has_files, read_run
from lockstep.observe.measures.latest import rate_of
from lockstep.observe.measures.recorder import StepRecorder
from lockstep.observe.measures.step import StepMeasures

PREFIX = "lockstep/"


class Measures(StepRecorder):
    """Measures of the steps of one ``Accelerator``, on this rank; rank 0 also writes them to the run's folder.

    A step is one of the optimizer, with all micro-batches of its window. It begins and ends where the loop asks a
    prepared loader for a batch after an optimizer step; in a loop without one, at the first forward after that. Rates
    and means are those of the latest 50 steps. What cannot be known is None, or absent.

    No collective is added for it, and no device is waited for. Made by the ``Accelerator``, which hands it out as
    ``accelerator.measures``.
    """

    @property
    def latest(self) -> StepMeasures | None:
        """The latest complete step of which all numbers have come; None before the first."""
        recent = self.recent
        return recent[-1] if recent else None

    @property
    def recent(self) -> Sequence[StepMeasures]:
        """The latest steps of which all numbers have come, at most 50, oldest first.

        Where no run folder is written, some of many short steps may be missing.
        """
        self._ended.catch_up()
        return list(self._ended.recent)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by part, and ``total``: means of the latest steps."""
        found = [each.seconds for each in self.recent if each.seconds is not None]
        names = {name for seconds in found for name in seconds}
        return {name: sum(each.get(name, 0.0) for each in found) / len(found) for name in sorted(names)}

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step: mean of the latest."""
        return self.seconds.get("total")

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all ranks that are trained on in a second."""
        return self._rate(lambda each: each.samples)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all ranks that are trained on in a second. See ``count_tokens``."""
        return self._rate(lambda each: each.tokens)

    @property
    def peak_flops(self) -> float | None:
        """Operations a second that one device could do at best, in the type that the run multiplies in.

        From a table for accelerators (``peaks.py``). A CPU's is measured when it is first asked for, in about 30 ms.
        """
        return self._ended.measured_peak()

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: what forward and backward compute, of what the devices could; 0 to 1."""
        return self._utilisation("model")

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: as ``mfu``, with forwards that are computed again."""
        return self._utilisation("hardware")

    @property
    def model_flops_per_second(self) -> float | None:
        """Floating-point operations of forward and backward in a second, over all ranks."""
        return self._rate(lambda each: (each.flops or {}).get("model"))

    @property
    def flops_unknown_because(self) -> str:
        """Why operations cannot be counted, in a sentence; "" where nothing is in the way."""
        return self._flops.unknown_because

    @property
    def memory(self) -> dict[str, int]:
        """The ``peak`` of this rank's memory, in bytes. ``accelerator.state_bytes()`` counts weights and state."""
        return self._memory.latest

    @property
    def goodput(self) -> Goodput | None:
        """How much of the run's time went into steps that count, with all attempts in its folder; None: it has none.

        Reads the folder each time: for now and then, not for every step.
        """
        if self._writer is None:
            return None
        self._ended.catch_up()
        folder = self._writer.folder
        folder.flush()
        return goodput_of(read_run(folder.path)) if has_files(folder.path) else None

    @property
    def folder(self) -> Path | None:
        """Where this process writes; None: nowhere."""
        return None if self._writer is None else self._writer.folder.path

    def numbers(self) -> dict[str, float]:
        """Return the latest numbers under the names that trackers get: ``lockstep/tokens_per_second`` and others."""
        found: dict[str, float | None] = {
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            **{f"seconds/{part}": value for part, value in self.seconds.items() if part != "total"},
        }
        return {PREFIX + name: value for name, value in found.items() if value is not None}

    def count_tokens(self, tokens: int) -> None:
        """Say how many tokens this rank trains on in a micro-batch; call it before ``backward``.

        Without it they are the elements of the batch's ``input_ids``, padding included.
        """
        self._stated_tokens = tokens

    def count_flops(self, model: float, hardware: float | None = None) -> None:
        """Say how many floating-point operations this rank does in a micro-batch; call it before ``backward``.

        For what cannot be counted, such as compiled models. In a step for which it is called nothing else counts.

        Args:
            model: Of forward and backward.
            hardware: With those that are computed again; None: as many.
        """
        self._end_step_without_loader()
        self._flops.add_stated(model, model if hardware is None else hardware)

    def event(self, name: str, /, **values: Any) -> None:
        """Write an event of the script's own to ``events.jsonl``, with values that JSON has."""
        self._write_event(name, step=self.step, **values)

    def _utilisation(self, kind: str) -> float | None:
        rate = self._rate(lambda each: (each.flops or {}).get(kind))
        peak = None if rate is None else self.peak_flops
        return None if rate is None or peak is None else rate / (peak * self._runtime.world_size)

    def _rate(self, amount: Callable[[StepMeasures], float | None]) -> float | None:
        return rate_of(self.recent, amount)
