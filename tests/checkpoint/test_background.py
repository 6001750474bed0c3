"""Saving while training goes on: what is saved, who hears of failures, and what it costs."""

from __future__ import annotations

import errno
import logging
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from checkpoint import saved_files
from lockstep import Accelerator, ProjectConfiguration
from lockstep.checkpoint.store import LocalStore
from lockstep.errors import LockstepError
from tests.warm_interpreter import WarmInterpreter


class Counter:
    """An object of the user's whose state are a number and a tensor, both changed in place."""

    def __init__(self) -> None:
        self.values, self.sums = [0], torch.zeros(3)

    def count(self) -> None:
        self.values.append(len(self.values))
        self.sums += 1

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.sums = list(state["values"]), state["sums"].clone()


class Run:
    def __init__(self, parallel: str | None = None, project: ProjectConfiguration | None = None) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, parallel=parallel, project_config=project)
        model = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            rows, labels = torch.randn(4, 5), torch.randint(0, 2, (4,))
            self.accelerator.backward(F.cross_entropy(self.model(rows), labels))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.counter.count()

    def state(self) -> dict[str, Any]:
        found = {name: whole(t) for name, t in self.model.state_dict().items()}
        for i, values in enumerate(self.optimizer.state.values()):
            found |= {f"{i}.{key}": whole(value) for key, value in values.items()}
        generator = torch.get_rng_state()
        return found | {
            "sums": self.counter.sums.clone(),
            "values": list(self.counter.values),
            "rng": generator,
        }


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert a.keys() == b.keys()
    equal = {n: torch.equal(a[n], b[n]) if isinstance(a[n], torch.Tensor) else a[n] == b[n] for n in a}
    return [name for name, same in equal.items() if not same]


@contextmanager
def writes(before: Any) -> Iterator[None]:
    """``before(path)`` runs before each file is written."""
    original = LocalStore.write

    def write(self: LocalStore, path: str, chunks: Any) -> Any:
        before(path)
        return original(self, path, chunks)

    with mock.patch.object(LocalStore, "write", write):
        yield


def shares(parallel: str | None, directory: str) -> dict[str, Any]:
    run = Run(parallel)
    run.train(1)
    copies = run.accelerator._checkpointer.background.stager
    run.accelerator.save_state(f"{directory}/blocking")
    sizes = [copies.nbytes]
    places = []
    for i in range(2):
        run.accelerator.save_state(f"{directory}/{i}", blocking=False)
        run.accelerator.wait_for_checkpoint()
        sizes.append(copies.nbytes)
        places.append(
            {(f, key): copy.data_ptr() for (f, key), copy in copies._copies.items() if "@" not in key}
        )
        run.train(1)
    return {"sizes": sizes, "same memory": places[0] == places[1], "copies": len(places[0])}


@pytest.mark.parametrize(("world_size", "parallel"), [(1, None), (2, "zero=3")])
def test_the_memory_is_one_copy_of_what_this_rank_writes(
    run_distributed: Any, tmp_path: Path, world_size: int, parallel: str | None
) -> None:
    for rank, found in enumerate(run_distributed(shares, world_size, parallel, str(tmp_path))):
        written = [
            sum(
                t.nbytes
                for path in (tmp_path / name).glob(f"*-{rank:05d}*.safetensors")
                for t in load_file(path).values()
            )
            for name in "01"
        ]
        assert found["sizes"] == [0, *written]
        assert found["same memory"]
        assert found["copies"] > 3


def fails(directory: str) -> list[dict[str, Any]]:
    """Rank 1 cannot write a save; the next call after that is of another kind each time."""
    records: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep.checkpoint").addHandler(handler)
    run = Run("zero=3")
    accelerator, rank = run.accelerator, run.accelerator.process_index
    accelerator.save_state(f"{directory}/first")

    def full(path: str) -> None:
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    found = []
    for call in (
        accelerator.wait_for_checkpoint,
        lambda: accelerator.save_state(f"{directory}/third"),
        lambda: accelerator.save_state(f"{directory}/third", blocking=False),
        lambda: accelerator.load_state(f"{directory}/first"),
        accelerator.end_training,
    ):
        records.clear()
        with writes(full):
            accelerator.save_state(f"{directory}/second", blocking=False)
            run.train(1)
            accelerator._checkpointer.background._thread.join()  # type: ignore[union-attr]
        with pytest.raises(LockstepError) as error:
            call()
        accelerator.wait_for_everyone()
        there = sorted(path.name for path in Path(directory).iterdir())
        accelerator.wait_for_everyone()
        found.append({"error": str(error.value), "log": list(records), "there": there})
        accelerator.wait_for_checkpoint()  # it is said once
    return found


def test_a_failure_is_logged_and_raised_by_the_next_call_on_all_ranks(
    run_distributed: Any, tmp_path: Path
) -> None:
    for found in [one for rank in run_distributed(fails, 2, str(tmp_path)) for one in rank]:
        assert f"{tmp_path}/second, which was being saved in the background, was not saved" in found["error"]
        assert "Rank 1 could not write" in found["error"]
        assert "No space left on device" in found["error"]
        assert len(found["log"]) == 1
        assert "second was not saved" in found["log"][0]
        assert found["there"] == ["first"]


def one_at_a_time(directory: str) -> list[Any]:
    run = Run()
    running: list[str] = []
    seen: list[Any] = []

    def slow(path: str) -> None:
        name = Path(path).parent.name
        running.append(name)
        time.sleep(0.05)
        seen.append(sorted(set(running)))
        running.remove(name)

    with writes(slow):
        for i in range(3):
            run.accelerator.save_state(f"{directory}/{i}", blocking=False)
            before = Path(directory) / str(i - 1)
            run.accelerator.wait_for_everyone()
            seen.append(i == 0 or (before / "manifest.json").exists())
        run.accelerator.wait_for_checkpoint()
    return seen


def test_there_are_never_two_at_once(run_distributed: Any, tmp_path: Path) -> None:
    for seen in run_distributed(one_at_a_time, 2, str(tmp_path)):
        assert [one for one in seen if isinstance(one, bool)] == [True] * 3
        assert all(len(names) == 1 for names in seen if isinstance(names, list))


SCRIPT = """
    import sys, threading
    import torch
    from lockstep import Accelerator
    from lockstep.checkpoint.store import LocalStore
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 3)
    accelerator.prepare(model)
    model.bias.data.fill_(1)
    accelerator.save_state(sys.argv[1])
    original = LocalStore.write
    def write(self, path, chunks):
        threading.main_thread().join()
        if sys.argv[2] == "fails":
            raise OSError("the disk is gone")
        return original(self, path, chunks)
    LocalStore.write = write
    model.bias.data.fill_(2)
    accelerator.save_state(sys.argv[1], blocking=False)
    if sys.argv[2] == "raises":
        raise ValueError("training failed")
"""


@pytest.mark.parametrize("kind", ["raises", "fails"])
def test_a_process_does_not_end_before_its_save(
    warm_interpreter: WarmInterpreter, tmp_path: Path, kind: str
) -> None:
    """Also what comes after writing is done: the new one is verified, and the one that it replaces removed."""
    script, target = tmp_path / "script.py", tmp_path / "run" / "state"
    script.write_text(textwrap.dedent(SCRIPT))
    target.parent.mkdir()
    code, output = warm_interpreter.run(script, str(target), kind)
    assert code == (1 if kind == "raises" else 0), output
    if kind == "fails":
        assert "state was not saved: Rank 0 could not write" in output
        assert "the disk is gone" in output
    else:
        assert "was not saved" not in output
    assert [path.name for path in target.parent.iterdir()] == ["state"]
    saved_files.assert_manifest_tells_the_truth(target)
    bias = saved_files.tensors(target)["model.0.bias"]
    assert bias.tolist() == [1.0 if kind == "fails" else 2.0] * 3
