"""Pipelines train as one process does: every schedule, loops of all kinds, models of all kinds."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config import Schedule
from lockstep.errors import UsageError
from lockstep.parallel.pipeline import PipelineOptions, split_model
from tests.parallel.pipeline import problem, scenarios
from tests.patching import module_of

LOSS, GRADIENT = 5e-6, 1e-5  # relative; gradients norm-wise for each tensor


def agrees(difference: tuple[float, float]) -> bool:
    return difference[0] <= LOSS and difference[1] <= GRADIENT


def test_every_schedule_trains_as_one_process_does(run_distributed: Any) -> None:
    first, second = run_distributed(scenarios.schedules, 2, timeout_s=180)
    for results in (first, second):
        assert {
            name: one["difference"] for name, one in results.items() if not agrees(one["difference"])
        } == {}
    for word in problem.schedules():
        stages = 4 if word in ("interleaved", "zbv", "dualpipev") else 2
        held = [set(rank[word]["names"]) for rank in (first, second)]
        blocks = [
            sorted({name.split(".")[1] for name in names if name.startswith("blocks")}) for names in held
        ]
        v_shaped = word in ("zbv", "dualpipev")
        expected = [["0", "1"], ["2", "3"]] if stages == 2 else [["0", "2"], ["1", "3"]]
        assert blocks == ([["0", "3"], ["1", "2"]] if v_shaped else expected)
        # The embedding is used in the first and in the last stage; position and norm in one of them.
        last = 0 if v_shaped else 1
        assert [{"token.weight", "position.weight"} <= held[0], "norm.weight" in held[last]] == [True, True]
        assert ("token.weight" in held[1]) == (not v_shaped) and "position.weight" not in held[1]
        assert ("norm.weight" in held[1 - last]) is False
        assert first[word]["tied"] == ({} if v_shaped else {"token.weight": [0, 1]})
        owned = first[word]["owned"] + second[word]["owned"]
        assert Counter(owned) == Counter(set(held[0] | held[1]))
        assert [set(rank[word]["state"]) for rank in (first, second)] == held
        done = Counter(
            (stage, kind) for rank in (first, second) for _, stage, kind, _ in rank[word]["executed"]
        )
        for stage in range(stages):
            assert done[stage, "F"] == 4 == done[stage, "B"] + done[stage, "W"]
            assert done[stage, "I"] == done[stage, "W"]
        splits = any(kind == "W" for _, kind in done)
        assert splits == (word in ("zero_bubble", "zbv", "dualpipev"))
    orders = [[(kind, index) for _, _, kind, index in rank["1f1b"]["executed"]] for rank in (first, second)]
    assert orders[1] == [(kind, index) for index in range(4) for kind in "FB"]
    assert orders[0][:4] == [("F", 0), ("F", 1), ("B", 0), ("F", 2)]


def test_loops_with_several_forwards_have_one_process_gradients(run_distributed: Any) -> None:
    first, second = run_distributed(scenarios.loops, 2, timeout_s=120)
    assert [first.pop("last is None"), second.pop("last is None")] == [True, False]
    for results in (first, second):
        assert all(value is True for value in results.values() if isinstance(value, bool))
        assert {
            name: value for name, value in results.items() if value is not True and value > GRADIENT
        } == {}


def test_models_of_other_kinds_have_one_process_gradients(run_distributed: Any) -> None:
    first, second = run_distributed(scenarios.models, 2, timeout_s=120)
    for results in (first, second):
        assert results["autocast"] < GRADIENT and results["recomputed"] < GRADIENT
        for word in problem.schedules("1f1b", "zero_bubble", "dualpipev"):
            loss, gradient, logits, names = results[word]
            assert loss < 1e-6 and gradient < GRADIENT and logits
            assert set(names) <= set(results["names"])
    for word in problem.schedules("1f1b", "zero_bubble", "dualpipev"):
        assert set(first[word][3]) | set(second[word][3]) == set(first["names"])


SAYS = {
    "hook": ("Collects", "inside of a block", "x, aux = block(x)"),
    "branch": ("Branches", "needs the value", "Branch on inputs"),
    "order": ("blocks.3", "blocks.0", "in order"),
    "noise": ("Noise", "earlier stage"),
    "few blocks": ("3 blocks", "4 stages"),
    "bare": ("Stage 1", "no parameters"),
    "divide": ("batch of 8", "micro_batches=3"),
    "few": ("micro_batches=1", "at least 2"),
    "few for dualpipev": ("micro_batches=2", "at least 4"),
    "batch": ("batch of 1", "multiple of 2"),
    "split": ("'blocks.9'", "Did you mean"),
    "splits": ("names 2 blocks", "2 stages"),
    "first": ("'blocks.0'", "order"),
    "per rank": ("stages_per_rank=2", "interleaved"),
    "same batch": ("different batches", "prepare()"),
    "outputs": ("outputs='last'", "train_step"),
}


def test_what_cannot_be_split_is_refused_on_all_ranks(run_distributed: Any) -> None:
    first, second = run_distributed(scenarios.refusals, 2, timeout_s=120)
    carried_out = len(problem.schedules("dualpipev"))
    expected = {name: words for name, words in SAYS.items() if carried_out or name != "few for dualpipev"}
    assert first == second and first.keys() == expected.keys()
    for name, words in expected.items():
        assert [word for word in words if word not in first[name]] == [], first[name]


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "dualpipev"])
def test_a_torch_whose_split_backward_is_wrong_is_refused(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setattr(module_of(split_model), "splits_backward_exactly", lambda: False)
    mesh: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(UsageError, match=rf"'{schedule}'.*2\.13"):
        split_model(problem.GPT(), {}, mesh, PipelineOptions(Schedule(schedule)))


def test_stages_begin_where_they_are_asked_to(run_distributed: Any) -> None:
    first, second = run_distributed(scenarios.divided, 2, timeout_s=60)
    blocks = [f"blocks.{index}" for index in range(4)]
    assert (first["bytes"], second["bytes"]) == (blocks[:2], blocks[2:])
    assert (first["named"], second["named"]) == (blocks[:3], blocks[3:])
    for _ in problem.schedules("zbv"):
        assert (first["V"], second["V"]) == ([blocks[0], blocks[3]], blocks[1:3])
