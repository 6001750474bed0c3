"""Damaged checkpoints: found out before anything is loaded, and the older one is loaded instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkpoint.damage import KINDS
from checkpoint.damage_trial import Bench, Outcome

EACH, EACH_ON_TWO_RANKS = 4, 1
SHOWS_TENSORS = (
    "flipped bit of any file",
    "overwritten bytes",
    "truncated",
    "appended bytes",
    "missing file",
)


def outcomes(folder: str, each: int) -> list[Outcome]:
    bench = Bench(Path(folder))
    bench.check_the_newest_loads()
    return [bench.trial(kind, seed) for kind in KINDS for seed in range(each)]


@pytest.mark.parametrize(("world_size", "each"), [(1, EACH), (2, EACH_ON_TWO_RANKS)])
def test_damage_is_found_before_a_tensor_is_touched_and_the_older_checkpoint_is_loaded(
    run_distributed, tmp_path: Path, world_size: int, each: int
) -> None:
    for found in run_distributed(outcomes, world_size, str(tmp_path), each, timeout_s=150):
        assert len(found) == len(KINDS) * each
        assert [outcome for outcome in found if not outcome.is_right] == []
        for outcome in found:
            if outcome.kind in SHOWS_TENSORS and ".safetensors" in outcome.message:
                assert re.search(r" It holds (model|optimizer|object|rank)\.0\.", outcome.message)
