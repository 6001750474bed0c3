"""What people write, under every strategy that splits a model: plain torch's numbers, or a refusal by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frozen.verdicts import hold
from tests.parallel.split.problem import STRATEGIES, outcomes
from tests.parallel.split.refusals import REFUSED
from tests.parallel.split.table import FAST, FRAGMENTS

AT_ONCE = 60
OTHER_RANK = "This rank stops with it."


def refusals(strategy: str) -> dict[str, str]:
    """Fragment -> a piece of what refuses it under this strategy."""
    return {name: piece for piece, names in REFUSED[strategy].items() for name in names}


def check(run_distributed: Any, strategy: str, names: list[str]) -> None:
    says = refusals(strategy)
    wrong = {}
    ranks = run_distributed(outcomes, 2, names, strategy, timeout_s=1500)
    hold(f"split, {STRATEGIES[strategy]}", ranks)
    for results in ranks:
        for name, (word, text) in results.items():
            expected = "refused" if name in says else "equal"
            is_said = says.get(name, "") in text or OTHER_RANK in text
            if word != expected or not is_said:
                wrong[name] = (word, text, f"expected: {expected} {says.get(name, '')}")
    assert wrong == {}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_people_write_is_right_or_refused(run_distributed: Any, strategy: str) -> None:
    check(run_distributed, strategy, list(FAST[strategy]))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(-(-len(FRAGMENTS) // AT_ONCE)))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_everything_that_people_write_is_right_or_refused(
    run_distributed: Any, strategy: str, part: int
) -> None:
    check(run_distributed, strategy, list(FRAGMENTS)[part * AT_ONCE : (part + 1) * AT_ONCE])


def test_every_refusal_is_of_a_fragment() -> None:
    for strategy, said in REFUSED.items():
        names = [name for names in said.values() for name in names]
        assert len(names) == len(set(names)), strategy
        assert set(names) <= set(FRAGMENTS), strategy
        assert set(FAST[strategy]) <= set(FRAGMENTS), strategy
