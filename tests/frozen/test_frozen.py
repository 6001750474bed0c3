"""What the files of this folder say still holds."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from parallel.test_split_parity import Case
from tests.frozen import features, names, numbers
from tests.frozen.files import VARIABLE, is_recording, read
from tests.frozen.verdicts import OF_ANOTHER_RANK, hold, verdict, word


@pytest.mark.parametrize("file", list(names.FILES))
def test_public_names_are_those_of_the_file(file: str) -> None:
    now, frozen = names.FILES[file](), read(file)
    changed = {name for name in now.keys() | frozen.keys() if now.get(name) != frozen.get(name)}
    assert {name: (frozen.get(name), now.get(name)) for name in changed} == {}, "python -m tests.frozen"


def test_no_feature_works_less_well() -> None:
    assert features.worse(read("features"), features.now()) == {}


def test_a_feature_that_works_less_well_is_found() -> None:
    states = {"tp": "works", "pp": "works, on plain modules", "gpus": "no"}
    better = {"tp": "works", "pp": "works", "gpus": "works; on one", "new": "no"}
    assert features.worse(states, better) == {}
    assert features.worse(states, {"tp": "works; on two ranks", "pp": "no"}).keys() == states.keys()


def test_no_verdict_is_wrong_and_the_table_covers_what_it_did() -> None:
    count = Counter(map(word, read("verdicts").values()))
    assert count.keys() == {"same", "refused"}
    assert sum(count.values()) >= 4000


def test_ranks_that_disagree_are_wrong_and_a_refusal_is_its_first_sentence() -> None:
    refused = ("refused", "At tests/x.py, line 3: no. Use ddp.")
    assert verdict([("equal", ""), ("equal", "")]) == "same"
    assert verdict([("refused", OF_ANOTHER_RANK), refused]) == "refused: At tests/x.py, line N: no"
    assert word(verdict([("equal", ""), refused])) == "wrong"
    assert word(verdict([("differs", "by 1.0")])) == "wrong"


def test_another_verdict_fails_and_so_does_a_case_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    group, _, case = next(row for row, text in read("verdicts").items() if text == "same").partition(": ")
    hold(group, [{case: ("equal", "")}])
    for found in ({case: ("refused", "No.")}, {"a new case": ("equal", "")}):
        with pytest.raises(AssertionError, match=re.escape(next(iter(found)))):
            hold(group, [found])


def test_there_are_forty_configurations() -> None:
    assert len(numbers.CASES) == 40
    assert {str(case) for case in numbers.CASES} == read("numbers").keys()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_five_steps_give_the_frozen_numbers(run_distributed: Any, world_size: int) -> None:
    found = numbers.measure(world_size, run_distributed)
    if not is_recording({str(case): one for case, one in found.items()}):
        assert {str(case): far for case, one in found.items() if (far := apart_from_file(case, one))} == {}


def apart_from_file(case: Case, found: dict[str, list[float]]) -> list[str]:
    return numbers.apart(case, found, read("numbers")[str(case)])


@pytest.mark.parametrize(
    ("case", "factor"), [(numbers.CASES[0], 1 + 1e-4), (numbers.CASES[2], 0.95)], ids=str
)
def test_numbers_that_move_by_more_than_rounding_are_found(case: Case, factor: float) -> None:
    frozen = read("numbers")[str(case)]
    for name, values in frozen.items():
        found = frozen | {name: [*values[:-1], values[-1] + (factor - 1) * values[0]]}
        assert len(numbers.apart(case, found, frozen)) == 1


PLAIN = {(c.model, c.layers, c.accumulation, c.optimizer): c for c in numbers.CASES if c.precision == "no"}


@pytest.mark.parametrize("case", PLAIN.values(), ids=str)
def test_the_frozen_numbers_are_plain_torchs(case: Case) -> None:
    assert apart_from_file(case, numbers.plainly(case)) == []
