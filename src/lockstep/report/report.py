"""One run, or several beside each other: as sentences, as JSON, as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.history.read import RunHistory, read_run
from lockstep.report.compare import (
    check_count,
    comparison_sentences,
    numbers_part,
    settings_that_differ,
    told_apart,
)
from lockstep.report.language_model import LanguageModel
from lockstep.report.numbers import RunNumbers, numbers_of
from lockstep.report.plain import plain_value, to_json
from lockstep.report.summary import chapters, sentences

FORMAT = "lockstep report 1"
SINGLE, SEVERAL = "report.html", "comparison.html"
"""The file that is written in the folder of the first run if no other is named."""


@dataclass(frozen=True)
class RunReport:
    """What is said of ``runs``, whose ``names`` tell them apart, at ``now`` (seconds since 1970); and of how long
    ``language_model`` would take at their rates."""

    runs: tuple[RunHistory, ...]
    numbers: tuple[RunNumbers, ...]
    names: tuple[str, ...]
    now: float
    language_model: LanguageModel | None = None

    @property
    def default_path(self) -> Path:
        return self.runs[0].path / (SINGLE if len(self.runs) == 1 else SEVERAL)

    def text(self) -> list[tuple[str, list[str]]]:
        """(title, sentences): of one run what it did, of several what differs and each run's own."""
        if len(self.runs) == 1:
            said = [
                ("At this rate", self._rate(one)) for one in self.numbers if self.language_model is not None
            ]
            return [*chapters(self.numbers[0]), *said]
        own = [
            (name, [*sentences(one), *self._rate(one)])
            for name, one in zip(self.names, self.numbers, strict=True)
        ]
        return [("What differs", comparison_sentences(self.runs, self.names)), *own]

    def _rate(self, numbers: RunNumbers) -> list[str]:
        return [] if self.language_model is None else [self.language_model.sentence(numbers)]

    def page(self) -> str:
        """A complete HTML document that loads nothing."""
        if len(self.runs) == 1:
            from lockstep.report.page.document import run_page

            return run_page(self.runs[0], self.numbers[0], self.now)
        from lockstep.report.page.comparison import comparison_page

        return comparison_page(self.runs, self.numbers, self.names, self.now)

    def to_json(self) -> dict[str, object]:
        """``format``; ``runs``: of each its ``name``, ``path``, ``sentences`` and all that ``plain.to_json`` has;
        ``language_model_seconds``, if one was asked for; ``comparison``, null for one run: its ``sentences``,
        ``settings`` that differ (``name``, ``values``, ``sources``), and for each run after the first where its
        ``numbers`` part from those of the first (``compare.NumbersPart``)."""
        runs = [
            {
                "name": name,
                "path": str(run.path),
                "sentences": [*sentences(one), *self._rate(one)],
                **to_json(one),
                **self._seconds(one),
            }
            for name, run, one in zip(self.names, self.runs, self.numbers, strict=True)
        ]
        return {"format": FORMAT, "runs": runs, "comparison": self._comparison()}

    def _seconds(self, numbers: RunNumbers) -> dict[str, object]:
        model = self.language_model
        return {} if model is None else {"language_model_seconds": plain_value(model.seconds(numbers))}

    def _comparison(self) -> dict[str, object] | None:
        if len(self.runs) == 1:
            return None
        settings = [
            {
                "name": one.name,
                "values": [value for value, _ in one.values],
                "sources": [source for _, source in one.values],
            }
            for one in settings_that_differ(self.runs)
        ]
        parts = [
            {"name": name, **{key: plain_value(value) for key, value in vars(part).items()}}
            for name, part in zip(
                self.names[1:], (numbers_part(self.runs[0], run) for run in self.runs[1:]), strict=True
            )
        ]
        said = comparison_sentences(self.runs, self.names)
        return {"sentences": said, "settings": settings, "numbers": parts}


def report_of(
    paths: Sequence[str | Path], now: float, language_model: LanguageModel | None = None
) -> RunReport:
    """Read the folders of these runs; ``language_model``: say how long its training would take.

    Raises:
        ConfigError: one of them is no run's folder, or there are too many.
    """
    check_count(paths)
    runs = tuple(read_run(path) for path in paths)
    numbers = tuple(numbers_of(run, now) for run in runs)
    return RunReport(runs, numbers, tuple(told_apart(runs)), now, language_model)
