"""The progress bar: on the local main process only."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from lockstep import tqdm
from lockstep.errors import ConfigError


def drawn(**options: Any) -> str:
    screen = io.StringIO()
    assert list(tqdm(range(3), file=screen, desc="epoch", **options)) == [0, 1, 2]
    return screen.getvalue()


def test_the_bar_appears_before_a_runtime_exists() -> None:
    assert "epoch: 100%" in drawn()


def test_the_bar_appears_once_per_machine(as_rank: Callable[..., Any]) -> None:
    as_rank(2, world_size=4, local_rank=0)
    assert "epoch" in drawn()
    as_rank(1)
    assert drawn() == ""


def test_the_bar_appears_everywhere_when_asked(as_rank: Callable[..., Any]) -> None:
    as_rank(1)
    assert "epoch" in drawn(main_process_only=False)


def test_a_disabled_bar_stays_disabled_on_the_main_process(as_rank: Callable[..., Any]) -> None:
    as_rank(0)
    assert drawn(disable=True) == ""


def test_a_bool_in_place_of_the_iterable_is_refused() -> None:
    with pytest.raises(ConfigError):
        tqdm(True, range(3))
