"""Trials in forks of one process that has torch in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.tune import WORKER, RankReport, TrialEnd, TrialSpec, Tuner, TuneRequest, TuneResult, refuse_sums
from tests.verify.forks import ForkServer

SCRIPT = Path(__file__).parent / "script.py"
LIMIT_S = 120


class Forks:
    """Tunes the script with other words, and on other numbers of ranks."""

    def __init__(self) -> None:
        self._server = ForkServer(worker=WORKER)

    def tune(self, words: Sequence[object], ranks: int = 1, **request: Any) -> TuneResult:
        with tempfile.TemporaryDirectory() as folder:
            words = [str(SCRIPT), *map(str, words)]
            asked = TuneRequest(tuple(map(str, words)), Path(folder), **request)
            result = Tuner(asked, run=lambda spec: self.trial(spec, asked.words, ranks)).result()
        refuse_sums(result)
        return result

    def trial(self, spec: TrialSpec, words: Sequence[str], ranks: int) -> TrialEnd:
        folder = Path(spec.folder)
        folder.mkdir(parents=True)
        log = folder / "output.txt"
        code = self._server.run(spec.write(folder / "spec.json"), words, ranks, log, LIMIT_S)
        text = log.read_text("utf-8", "replace")
        return TrialEnd(
            code, tuple(RankReport.read_all(folder)), code == -9, "MemoryError" in text, text, text
        )

    def close(self) -> None:
        self._server.close()
