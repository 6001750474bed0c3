"""Two thousand random configurations and command lines; ``benchmarks/fuzz.py`` takes ten times as many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.config.fuzzing.trial import MAKERS, Outcome, made, sandbox, trial, warm_up

INPUTS = 2_000
FIRST = 1_000_000  # other inputs than those of the benchmark


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Outcome]]:
    with sandbox(tmp_path_factory.mktemp("fuzz")):
        warm_up()
        yield [trial(made(seed)) for seed in range(FIRST, FIRST + INPUTS)]


def test_each_is_read_as_it_says_or_refused_in_one_message_within_a_second(outcomes: list[Outcome]) -> None:
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    assert not failures, f"{len(failures)} of {INPUTS}:\n" + "\n".join(failures[:5])


def test_the_inputs_are_neither_all_refused_nor_all_accepted(outcomes: list[Outcome]) -> None:
    made_of = Counter(outcome.kind for outcome in outcomes)
    accepted = Counter(outcome.kind for outcome in outcomes if outcome.accepted)
    assert len(made_of) == len(MAKERS)
    for kind, count in made_of.items():
        if kind not in ("hostile YAML", "damaged JSON", "lockstep checkpoint"):
            assert 0.05 * count < accepted[kind] < 0.95 * count, kind


def test_the_judge_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that accept everything, change a value, drop a key, or raise something else are all caught."""
    from lockstep.compat.accelerate import from_yaml
    from lockstep.config import parse_yaml
    from tests.config.fuzzing import readers
    from tests.config.fuzzing.pools import Input

    def fails(text: str, means: dict[str, object], wrong: bool, read: object) -> bool:
        monkeypatch.setattr(readers, "load", read)
        return trial(Input("YAML", 0, text.encode(), means=means, wrong=wrong)).failure is not None

    def as_if(text: str) -> object:
        return lambda _path: from_yaml(parse_yaml(text, "in.yaml"))

    def raising(_path: str) -> object:
        raise KeyError("num_processes")

    with sandbox(tmp_path):
        good = "num_processes: 4\nnum_machines: 2\nmain_process_ip: a\nmain_process_port: 1\n"
        assert not fails(good, {"num_processes": 4}, False, as_if(good))
        assert fails(good, {"num_processes": 4}, True, as_if(good))
        assert fails(good, {"num_processes": 4}, False, as_if(good.replace("4", "8")))
        assert fails(good, {"num_processes": 4}, False, raising)
        assert fails("max_restarts: 3\n", {}, False, as_if("num_processes: 1\n"))
        assert fails("tipo: 3\n", {}, False, as_if("num_processes: 1\n"))
