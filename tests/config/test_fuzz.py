"""Wrong and right configurations and command lines, also random ones, of which ``benchmarks/fuzz.py`` takes more."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.fuzzing import each, files
from tests.config.fuzzing.pools import Input
from tests.config.fuzzing.trial import MAKERS, sandbox, trial, warm_up
from tests.marks import examples


@pytest.fixture(scope="module")
def _sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with sandbox(tmp_path_factory.mktemp("fuzz")):
        warm_up()
        yield


@pytest.mark.usefixtures("_sandbox")
def test_each_text_by_itself_and_each_hostile_file_is_read_as_it_says_or_refused() -> None:
    outcomes = [(given, trial(given)) for given in each.inputs()]
    failures = [outcome.failure for _, outcome in outcomes if outcome.failure]
    assert not failures, "\n".join(failures)
    right = [(given, outcome) for given, outcome in outcomes if each.stands_alone(given) and not given.wrong]
    assert len(right) > 200
    assert [given for given, outcome in right if not outcome.accepted] == []


@pytest.mark.usefixtures("_sandbox")
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_each_is_read_as_it_says_or_refused_in_one_message_within_a_second(
    make: Callable[[random.Random], Input],
) -> None:
    accepted: list[bool] = []

    @examples(100)
    @given(st.randoms(use_true_random=False))
    def check(source: random.Random) -> None:
        outcome = trial(make(source))
        assert outcome.failure is None, outcome.failure
        accepted.append(outcome.accepted)

    check()
    if make is not files.damaged_json:  # seldom read
        assert any(accepted) and not all(accepted)


def test_the_judge_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that accept everything, change a value, drop a key, or raise something else are all caught."""
    from lockstep.compat.accelerate import from_yaml
    from lockstep.config import parse_yaml
    from tests.config.fuzzing import readers

    def fails(text: str, means: dict[str, object], wrong: bool, read: object) -> bool:
        monkeypatch.setattr(readers, "load", read)
        return trial(Input("YAML", text.encode(), means=means, wrong=wrong)).failure is not None

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
