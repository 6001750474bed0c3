"""The robust score against numpy, the bounds of a policy, and the form of a saved state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep import SpikePolicy
from lockstep.errors import ConfigError
from lockstep.observe.spikes import RecentValues, check_form
from tests.refusals import expect_refusal


def test_the_score_is_that_of_the_formula() -> None:
    generator = np.random.default_rng(0)
    values = generator.lognormal(size=100)
    recent = RecentValues(window=20, warmup=10)
    for number, value in enumerate(values):
        before = values[max(0, number - 20) : number]
        score = recent.score(value)
        if number < 10:
            assert score is None
        else:
            spread = 1.4826 * np.median(np.abs(before - np.median(before)))
            assert score == pytest.approx((value - np.median(before)) / spread)
        recent.add(value)


@pytest.mark.parametrize(
    ("constant", "value", "expected"),
    [(2.0, 2.0, 0.0), (2.0, 2.02, 10.0), (2.0, 1.0, -500.0), (0.0, 0.0, 0.0), (0.0, 1e-9, float("inf"))],
)
def test_numbers_that_do_not_differ_have_a_spread(constant: float, value: float, expected: float) -> None:
    recent = RecentValues(window=8, warmup=4)
    recent.replace([constant] * 20)
    assert recent.values() == [constant] * 8
    assert recent.score(value) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "retry"}, "action is 'retry'"),
        ({"action": "skpi"}, "skip"),
        ({"loss_threshold": 0}, "loss_threshold is 0"),
        ({"gradient_norm_threshold": float("nan")}, "gradient_norm_threshold is nan"),
        ({"loss_threshold": True}, "loss_threshold is True"),
        ({"window": 3}, "from 4 to 10000"),
        ({"window": 8, "warmup": 9}, "from 4 to 8"),
        ({"max_skips": -1}, "max_skips is -1"),
    ],
)
def test_options_have_bounds(options: dict[str, Any], message: str) -> None:
    expect_refusal(ConfigError, message, SpikePolicy, **options)


GOOD: dict[str, Any] = {
    **dict.fromkeys(("steps", "batches", "samples", "steps_skipped", "batches_skipped", "samples_skipped"), 3),
    "in_a_row": 3,
    "first_batch": 4, "open": [0.0, float("nan")], "loss": [1.0], "gradient_norm": [],
}  # fmt: skip


def test_a_state_of_the_right_form_is_taken() -> None:
    check_form(GOOD)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": -1}, {"steps": 1.5}, {"steps": True}, {"open": [1.0]}, {"loss": [float("inf")]}, {"loss": "x"},
        {"loss": [1.0] * 10_001}, {"further": 1},
    ],
)  # fmt: skip
def test_a_state_of_another_form_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        check_form({**GOOD, **wrong})
