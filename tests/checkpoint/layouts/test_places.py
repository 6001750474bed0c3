"""Whose loader position, objects, generators and gradients a rank goes on with, where ranks share batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from checkpoint.layouts.spread import LAYOUTS, Run, State, optimizer_of, values
from checkpoint.layouts.test_layouts import checkpointer, training
from lockstep.checkpoint import CheckpointContents, load_checkpoint, save_checkpoint
from lockstep.errors import CheckpointError, LockstepError

BY_NAME = {layout.name: layout for layout in LAYOUTS}


class Kept:
    """A state that tells whose it was."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "rows": torch.full((2,), self.value)}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rows"].shape == (2,)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rows"].tolist() == [state["value"]] * 2
        self.value = state["value"]


FRESH = {
    "micro_batch": 0,
    "accumulation_steps": 1,
    "sync_gradients": True,
    "is_weighted": None,
    "agreed_divisor": False,
    "window_weight": None,
    "divisor": None,
}


class Window:
    """What a checkpoint asks of an open window: gradients of this rank's batches, and where training goes on."""

    def __init__(self, run: Run | None, layout: str, gradients: dict[str, torch.Tensor]) -> None:
        self.parameters = {} if run is None else dict(run.model.named_parameters())
        self.layout = layout
        self.gradients = gradients
        self.loaded: tuple[Any, int] = ([], -1)

    def state_dict(self) -> dict[str, Any]:
        model: dict[str, Any] = {
            "local": self.gradients,
            "reduced": {},
            "partial": {},
            "spent": ["embed.weight"],
        }
        model["takes_buffers"] = True
        return {"window": FRESH, "layouts": [self.layout], "models": [model]}

    def places(self) -> list[str]:
        return [f"0.{name}" for name in self.parameters]

    def is_unchanged(self, states: list[Any]) -> bool:
        return all(state["layouts"] == [self.layout] for state in states)

    def check(self, states: list[Any]) -> None:
        assert all(name in self.parameters for state in states for name in state["models"][0]["local"])

    def load_state_dicts(self, states: list[Any], rank: int) -> None:
        self.loaded = (states, rank)


def with_own(
    run: Run, rank: int, gradients: dict[str, torch.Tensor]
) -> tuple[CheckpointContents, Kept, Kept, Window]:
    loader, item, window = Kept(rank), Kept(rank), Window(run, run.layout.name, gradients)
    whole = training(run)
    whole.parts |= {"loader": [loader], "object": [item], "window": [window]}
    return whole, loader, item, window


def saves(name: str, directory: str, inside: bool) -> None:
    """Save with states that say the rank; ``inside`` a window, with this rank's part of a gradient."""
    torch.set_num_threads(1)
    saver = checkpointer()
    rank = saver.runtime.rank
    run = Run(BY_NAME[name].prepare(rank), State.drawn(1, 2))
    gradients = {n: p.detach() * (rank + 1) for n, p in run.model.named_parameters() if "up" in n}
    torch.manual_seed(rank)
    save_checkpoint(saver, directory, lambda: with_own(run, rank, gradients if inside else {})[0], {})


def loads(name: str, directory: str) -> dict[str, Any]:
    """Whose states this rank got."""
    torch.set_num_threads(1)
    loader = checkpointer()
    rank = loader.runtime.rank
    run = Run(BY_NAME[name].prepare(rank), State.drawn(1, 2))
    whole, position, item, window = with_own(run, -1, {})
    torch.manual_seed(99)
    try:
        load_checkpoint(loader, directory, lambda: whole)
    except CheckpointError as error:
        return {"refused": str(error)}
    seed = torch.initial_seed()
    states, mine = window.loaded
    parts = {n: p.to_local() if hasattr(p, "to_local") else p for n, p in run.model.named_parameters()}
    gradients = states[mine]["models"][0]["local"] if mine < len(states) else {}
    right = all(torch.equal(gradient, parts[n] * (rank + 1)) for n, gradient in gradients.items())
    spent = [state["models"][0]["spent"] for state in states]
    return {
        "loader": position.value,
        "object": item.value,
        "seed": seed,
        "windows": len(states),
        "mine": mine,
        "gradients": len(gradients),
        "right": right,
        "spent": spent,
    }


def test_a_rank_goes_on_with_the_batches_of_its_data_rank(run_distributed: Any, tmp_path: Any) -> None:
    directory = str(tmp_path / "ended")
    run_distributed(saves, 4, "ddp tp=2", directory, False)
    same = run_distributed(loads, 4, "ddp tp=2", directory)
    assert [one["loader"] for one in same] == [one["object"] for one in same] == [0, 1, 2, 3]
    assert [one["seed"] for one in same] == [0, 1, 2, 3]
    assert [(one["windows"], one["mine"]) for one in same] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    # As many ranks, each with batches of its own now: dealt anew, so that only the first one's position counts.
    other = run_distributed(loads, 4, "ddp ep=2", directory)
    assert [one["loader"] for one in other] == [0] * 4
    assert [one["seed"] for one in other] == [99] * 4
    # Half the ranks, but the same batches.
    fewer = run_distributed(loads, 2, "ddp", directory)
    assert [one["loader"] for one in fewer] == [one["object"] for one in fewer] == [0, 2]
    assert [one["seed"] for one in fewer] == [99] * 2
    assert [one["spent"] for one in fewer] == [[["embed.weight"]] * 2] * 2
    # One stage has the first name of the tied weights, the other has not.
    stages = run_distributed(loads, 2, "pp=2", directory)
    assert [one["loader"] for one in stages] == [0, 0]
    assert [one["spent"] for one in stages] == [[["embed.weight"]] * 2, [[]] * 2]


def test_gradients_go_on_with_the_same_ranks_only(run_distributed: Any, tmp_path: Any) -> None:
    directory = str(tmp_path / "ddp")
    run_distributed(saves, 2, "ddp", directory, True)
    for one in run_distributed(loads, 2, "ddp", directory):
        assert one["right"]
        assert one["gradients"] == 8
    for other in ("pp=2", "zero=3"):
        for one in run_distributed(loads, 2, other, directory):
            assert "was saved inside an accumulation window" in one["refused"]


def refused(directory: str) -> list[str]:
    """What does not fit a pipeline, each wrong on one rank alone."""
    torch.set_num_threads(1)
    saver = checkpointer()
    rank = saver.runtime.rank
    layout = BY_NAME["pp=2"].prepare(rank)
    run, model = Run(layout, State.drawn(1, 2)), layout.build(values(1))
    lacking = CheckpointContents([model], {"optimizer": [optimizer_of(model)]}, layout.place, layout.whole)
    if rank == 1:
        del model.blocks["3"].table  # type: ignore[index, union-attr]
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    found = []
    for contents in (lacking, training(run)):
        with pytest.raises(LockstepError) as error:
            save_checkpoint(saver, directory, lambda contents=contents: contents, {})  # type: ignore[misc]
        found.append(str(error.value))
    return found


def test_what_does_not_fit_a_pipeline_is_an_error_on_all_its_ranks(
    run_distributed: Any, tmp_path: Any
) -> None:
    for lacking, groups in run_distributed(refused, 2, str(tmp_path / "wrong")):
        assert "No rank holds blocks.3.table of model 0" in lacking
        assert "has 2 groups of parameters on one rank and 3 on another" in groups
