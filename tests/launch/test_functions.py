from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep import debug_launcher, notebook_launcher
from lockstep.errors import ConfigError, UsageError
from tests.refusals import expect_refusal


def test_debug_launcher_runs_a_closure_on_processes_that_can_talk(tmp_path: Path) -> None:
    offset = 10.0

    def work(name: str) -> None:
        from lockstep import PartialState

        state = PartialState()
        value = torch.tensor([offset + state.process_index])
        dist.all_reduce(value)
        (tmp_path / f"{name}{state.process_index}").write_text(
            f"{value.item()} {state.num_processes} {state.device}"
        )

    debug_launcher(work, ("rank",), num_processes=2)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "rank0": "21.0 2 cpu",
        "rank1": "21.0 2 cpu",
    }


def test_the_environment_of_the_parent_is_left_alone(tmp_path: Path) -> None:
    before = dict(os.environ)
    seen: list[str | None] = []
    notebook_launcher(lambda: seen.append(os.environ.get("LOCKSTEP_MIXED_PRECISION")), (), 1, "bf16")
    assert seen == ["bf16"]
    assert dict(os.environ) == before


def test_notebook_launcher_sets_the_place_and_precision_of_each_process(tmp_path: Path) -> None:
    def work() -> None:
        facts = [os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCKSTEP_MIXED_PRECISION")]
        (tmp_path / os.environ["RANK"]).write_text(" ".join(facts))

    notebook_launcher(work, num_processes=2, mixed_precision="bf16")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2 0 bf16", "1": "2 1 bf16"}


def test_an_error_in_a_process_is_raised_with_its_traceback() -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("of rank 1")

    expect_refusal(Exception, "of rank 1", debug_launcher, work, num_processes=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_processes": 0}, "num_processes=0"),
        ({"num_processes": "two"}, "num_processes=two"),
        ({"mixed_precision": "bf61"}, "Did you mean 'bf16'"),
        ({"num_processes": 2, "num_nodes": 2}, "master_addr or use_port is missing"),
        ({"num_processes": 2, "node_rank": 1}, "node_rank=1"),
        ({"max_restarts": 2}, "max_restarts=2"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], sentence: str) -> None:
    expect_refusal(ConfigError, sentence, notebook_launcher, print, **arguments)


def test_a_process_that_belongs_to_a_group_is_not_forked(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(UsageError):
            debug_launcher(print, num_processes=2)
    finally:
        dist.destroy_process_group()
