"""What is planted in a step: its replay computes the same bits, and names the module that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replay.planted import BY_TWO, FAR, PLANTED, Planted
from tests.replay.replays import capsule_in, replay_here, run_script


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if not same_bits(one[name], other[name])]


@pytest.mark.parametrize("planted", [*PLANTED, *FAR], ids=str)
def test_a_replay_names_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: Planted) -> None:
    torch.set_num_threads(1)
    run, dumps = tmp_path / "run", tmp_path / "dumps"
    dumps.mkdir()
    arguments = (str(planted), str(run), str(dumps))
    run_script(*arguments)
    capsule = capsule_in(run)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    verdict = replay_here(monkeypatch, capsule, *arguments)
    found = verdict.finding
    assert found is not None
    assert (found.where, found.module) == (planted.where, planted.module)
    assert found.micro_batch == planted.accumulation - 1
    assert planted not in FAR or (verdict.ordinary == 8 and found.score is not None)
    assert verdict.has_same_bits
    norms = 0 if planted.kind == "half" else 1  # the loss scaler's
    assert len(verdict.compared) == planted.accumulation + norms
    in_run, in_replay = (torch.load(dumps / f"rank-0-{i}.pt") for i in range(2))
    assert differing(in_run, in_replay) == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([*before, "rank-0-1.pt"])


def run_on_ranks(arguments: list[tuple[str, ...]]) -> None:
    torch.set_num_threads(1)
    for each in arguments:
        run_script(*each)


def test_a_replay_makes_the_ranks_steps_one_after_another(
    run_distributed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    arguments = []
    for number, planted in enumerate(BY_TWO):
        folder = tmp_path / str(number)
        folder.mkdir()
        arguments.append((str(planted), str(folder / "run"), str(folder)))
    run_distributed(run_on_ranks, 2, arguments)
    for planted, each in zip(BY_TWO, arguments, strict=True):
        folder = Path(each[2])
        verdict = replay_here(monkeypatch, capsule_in(folder / "run"), *each)
        found = verdict.finding
        assert found is not None
        assert (found.where, found.module, found.rank) == (planted.where, planted.module, 1)
        assert verdict.has_same_bits
        assert [(one.what, one.rank) for one in verdict.compared] == [
            ("loss", rank) for rank in (0, 1) for _ in range(planted.accumulation)
        ]
        first, second = (torch.load(folder / f"rank-{rank}-0.pt") for rank in (0, 1))
        of_first, of_second = (torch.load(folder / f"rank-0-{number}.pt") for number in (1, 2))
        assert same_bits(first.pop("loss"), of_first.pop("loss"))
        assert same_bits(second.pop("loss"), of_second.pop("loss"))
        mean = {name: of_first[name] / 2 + of_second[name] / 2 for name in of_first}
        assert differing(first, mean) == []
