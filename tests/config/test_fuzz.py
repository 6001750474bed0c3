"""Wrong and right configurations and command lines, also random ones, of which ``benchmarks/fuzz.py`` takes more."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

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
