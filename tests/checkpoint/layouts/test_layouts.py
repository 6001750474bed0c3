"""A checkpoint of any layout loads into any other: every rank then holds what torch cuts from the whole tensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.layouts.spread import LAYOUTS, Layout, Run, State, part, values
from lockstep import Accelerator, ProjectConfiguration
from lockstep.checkpoint import CheckpointContents, Checkpointer, load_checkpoint, save_checkpoint
from lockstep.checkpoint.weights import open_weights, write_file
from lockstep.runtime import StepState

SOURCES = ("plain", "pp=2 tp=2")
"""Of these each layout loads; of the others the plain model, and of some those that have most in common or least."""
MORE = {
    "zero=3 tp=2": "pp=4",
    "pp=4": "zero=3 tp=2",
    "pp=2": "zero=3 tp=2",
    "tp=2": "ddp tp=2",
    "ep=2": "ddp ep=2",
}
WORLDS = sorted({layout.world for layout in LAYOUTS})


def checkpointer() -> Checkpointer:
    accelerator = Accelerator(cpu=True)
    return Checkpointer(
        accelerator.runtime,
        accelerator._communicator,
        ProjectConfiguration(),
        lambda *_: None,
        StepState(),
    )


def training(run: Run) -> CheckpointContents:
    layout = run.layout
    return CheckpointContents([run.model], {"optimizer": [run.optimizer]}, layout.place, layout.whole)


def of_this_world(runtime: Any) -> list[Layout]:
    torch.set_num_threads(1)
    return [layout.prepare(runtime.rank) for layout in LAYOUTS if layout.world == runtime.world_size]


def save_all(directory: str) -> None:
    saver = checkpointer()
    for layout in of_this_world(saver.runtime):
        run = Run(layout, State.drawn(seed=1, steps=2))
        save_checkpoint(saver, f"{directory}/{layout.name}", partial(training, run), {})


def load_all(directory: str) -> list[str]:
    """What differs, by the layouts that were saved and loaded."""
    loader = checkpointer()
    wrong = []
    for layout in of_this_world(loader.runtime):
        expected = Run(layout, State.drawn(seed=1, steps=2))
        parts = expected.parts()
        run = Run(layout, State.drawn(seed=5, steps=7))
        for saved in LAYOUTS:
            if layout.name != "plain" and saved.name not in (*SOURCES, MORE.get(layout.name)):
                continue
            clear(run)
            load_checkpoint(loader, f"{directory}/{saved.name}", partial(training, run))
            wrong += [f"{saved.name} -> {layout.name}: {name}" for name in differing(run.parts(), parts)]
        for one in (run, expected):
            one.step(values(9))
        wrong += [f"{layout.name}, next step: {name}" for name in differing(run.parts(), expected.parts())]
    return wrong


def clear(run: Run) -> None:
    """Forget everything, so that nothing is there already that loading should bring."""
    for tensor in run.model.state_dict().values():
        part(tensor, copy=False).zero_()
    run.optimizer.state.clear()


def differing(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(actual[name], value)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, worker_pool: Any) -> str:
    """Where each layout has saved the same state."""
    path = str(tmp_path_factory.mktemp("saved"))
    for world in WORLDS:
        worker_pool.run(save_all, world, path, timeout_s=120)
    return path


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_of_any_layout_gets_its_part_of_what_any_other_saved(
    run_distributed: Any, directory: str, world: int
) -> None:
    for wrong in run_distributed(load_all, world, directory, timeout_s=120):
        assert wrong == []


@pytest.mark.parametrize("name", ["zero=3 tp=2", "pp=2 tp=2", "ddp ep=2"])
def test_weights_are_whole_for_other_programs(directory: str, tmp_path: Path, name: str) -> None:
    written = write_file(
        open_weights(f"{directory}/{name}"), str(tmp_path / "model.safetensors"), replace=False
    )
    found, expected = load_file(written), values(1)
    assert found.keys() == expected.keys() - {"head.weight"}  # the tied one has its first name
    assert [key for key, tensor in found.items() if not torch.equal(tensor, expected[key])] == []
