"""What differs by rank comes back on its rank; what is equal on all is stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkpoint import saved_files
from lockstep import Accelerator, DistributedDataParallelKwargs

BIG, SMALL = 100_000, 7


class Mine:
    """An object of the user's: plain values and tensors, some equal on all ranks and some not."""

    def __init__(self, rank: int, big: torch.Tensor | None = None) -> None:
        self.state = {
            "rank": rank,
            "names": [f"shard-{rank}-{i}" for i in range(rank)],
            "own": torch.full((SMALL,), rank),
            "shape": torch.full((rank + 1,), 1.5),
            "big": torch.arange(BIG).float() if big is None else big,
            "array": np.arange(rank, rank + 3),
        }
        if rank == 1:
            self.state["only here"] = torch.ones(2, dtype=torch.bool)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def save_mine(directory: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Mine(accelerator.process_index))
    accelerator.save_state(directory)


def load_mine(directory: str, from_rank: int | None) -> bool:
    """Whether the state is that of this rank, or of the given one."""
    accelerator = Accelerator(cpu=True)
    item = Mine(17)
    accelerator.register_for_checkpointing(item)
    accelerator.load_state(directory)
    return equal(item.state, Mine(accelerator.process_index if from_rank is None else from_rank).state)


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_gets_its_own_object_back(run_distributed: Any, tmp_path: Path, world_size: int) -> None:
    directory = str(tmp_path / "state")
    run_distributed(save_mine, world_size, directory)
    assert run_distributed(load_mine, world_size, directory, None) == [True] * world_size
    other = 2 if world_size == 1 else world_size // 2
    assert run_distributed(load_mine, other, directory, 0) == [True] * other


@pytest.mark.parametrize("world_size", [2])
def test_tensors_of_objects_that_are_equal_on_all_ranks_are_stored_once(
    run_distributed: Any, tmp_path: Path, world_size: int
) -> None:
    directory = tmp_path / "state"
    run_distributed(save_mine, world_size, str(directory))
    sizes = {n: t.nbytes for n, t in saved_files.tensors(directory).items() if "object." in n}
    own = sum(8 * SMALL + 4 * (rank + 1) + 8 * 3 for rank in range(world_size)) + 2
    assert sum(sizes.values()) == 4 * BIG + own
    files = [path.stat().st_size for path in directory.iterdir()]
    assert sum(files) < 4 * BIG + own + 20_000 * world_size


# -- buffers ------------------------------------------------------------------------------------------------


def normed(broadcast: bool, seed: int) -> tuple[Accelerator, Any, nn.Module]:
    torch.manual_seed(seed)
    handler = DistributedDataParallelKwargs(broadcast_buffers=broadcast)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return accelerator, accelerator.prepare(plain), plain


def forwards(accelerator: Accelerator, model: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(5, 3) + accelerator.process_index)


def buffers_of(plain: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in plain.named_buffers()}


def buffers_that_differ(broadcast: bool, directory: str) -> dict[str, Any]:
    accelerator, model, plain = normed(broadcast, seed=0)
    torch.manual_seed(accelerator.process_index)
    forwards(accelerator, model, 3)
    before = buffers_of(plain)
    accelerator.save_state(directory)
    forwards(accelerator, model, 2)
    after = buffers_of(plain)

    other, loaded, fresh = normed(broadcast, seed=1)
    forwards(other, loaded, 1)
    other.load_state(directory)
    restored = buffers_of(fresh)
    forwards(other, loaded, 2)
    return {
        "means": accelerator.gather(before["1.running_mean"].view(1, -1)),
        "restored": equal(restored, before),
        "continued": equal(buffers_of(fresh), after),
    }


@pytest.mark.parametrize(("world_size", "broadcast"), [(4, True), (2, False)])
def test_buffers_that_differ_by_rank_come_back_on_their_rank(
    run_distributed: Any, tmp_path: Path, world_size: int, broadcast: bool
) -> None:
    for found in run_distributed(buffers_that_differ, world_size, broadcast, str(tmp_path / "state")):
        assert len(found["means"].unique(dim=0)) == world_size  # else this shows nothing
        assert found["restored"]
        assert found["continued"]


def load_elsewhere(directory: str) -> dict[str, torch.Tensor]:
    accelerator, _, plain = normed(True, seed=5)
    accelerator.load_state(directory)
    return buffers_of(plain)


def test_another_world_gets_the_buffers_of_the_first_rank(run_distributed: Any, tmp_path: Path) -> None:
    directory = tmp_path / "state"
    run_distributed(buffers_that_differ, 2, True, str(directory))
    tensors = saved_files.tensors(directory)
    for found in run_distributed(load_elsewhere, 4, str(directory)):
        assert equal(found, {name: tensors[f"model.0.{name}"] for name in found})


def equal_buffers(directory: str) -> None:
    accelerator, _, _ = normed(True, seed=0)
    accelerator.save_state(directory)


def test_equal_buffers_are_stored_once(run_distributed: Any, tmp_path: Path) -> None:
    directory = tmp_path / "state"
    run_distributed(equal_buffers, 4, str(directory))
    names = [name for name in saved_files.tensors(directory) if "running_mean" in name]
    assert names == ["model.0.1.running_mean"]
    for rank in range(4):
        assert "buffers" not in saved_files.document(directory, f"rank-0000{rank}.json")


# -- extra state --------------------------------------------------------------------------------------------


class Quantized(nn.Module):
    """With state beside its weights, of this kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def extras() -> dict[str, Any]:
    return {
        "plain": {"scale": 0.5, "history": [1, 2.5, None], "kind": ("fp8", torch.float8_e4m3fn)},
        "tensors": {"amax": torch.arange(4.0), "inner": {"bits": torch.tensor([True, False])}},
        "tensor": torch.arange(6, dtype=torch.uint8),
        "none": None,
    }


def through_a_checkpoint(kind: str, with_hook: bool, directory: str) -> bool:
    accelerator = Accelerator(cpu=True)
    model = Quantized(extras()[kind])
    accelerator.prepare(model)
    if with_hook:
        accelerator.register_save_state_pre_hook(lambda models, weights, output: None)
    accelerator.save_state(directory)
    other = Accelerator(cpu=True)
    fresh = Quantized(torch.zeros(6, dtype=torch.uint8) if kind == "tensor" else "nothing yet")
    other.prepare(fresh)
    other.load_state(directory)
    return equal(fresh.extra, extras()[kind]) and torch.equal(fresh.inner.weight, model.inner.weight)


@pytest.mark.parametrize(("kind", "with_hook"), [(kind, i % 2 > 0) for i, kind in enumerate(extras())])
def test_extra_state_of_modules_comes_back(
    run_distributed: Any, tmp_path: Path, kind: str, with_hook: bool
) -> None:
    directory = tmp_path / "state"
    assert run_distributed(through_a_checkpoint, 2, kind, with_hook, str(directory)) == [True, True]
    names = {name for name in saved_files.tensors(directory) if "extra" in name}
    assert len(names) == {"plain": 0, "tensors": 2, "tensor": 1, "none": 0}[kind]


# -- generators ---------------------------------------------------------------------------------------------


# -- sharded tensors of objects -----------------------------------------------------------------------------


class Average:
    """An average of a prepared model's weights, which are sharded as these are."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.weights.items():
            value.copy_(state["weights"][name])


def average(text: str, seed: int, directory: str, load: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True, parallel=text)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(plain, optimizer)
    accelerator.backward(F.mse_loss(model(torch.ones(2, 5)), torch.zeros(2, 3)))
    item = Average(accelerator.unwrap_model(model))
    optimizer.step()
    accelerator.register_for_checkpointing(item)
    if load:
        accelerator.load_state(directory)
    else:
        accelerator.save_state(directory)
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in item.weights.items()}


@pytest.mark.parametrize("saving", [(4, "zero=2 replicate=2"), (1, "ddp")])
def test_sharded_tensors_of_objects_are_stored_once_and_load_in_other_layouts(
    run_distributed: Any, tmp_path: Path, saving: tuple[int, str]
) -> None:
    directory = tmp_path / "state"
    world_size, text = saving
    expected = run_distributed(average, world_size, text, 0, str(directory), False)[0]
    sizes = [t.nbytes for n, t in saved_files.tensors(directory).items() if ".weights." in n]
    assert sum(sizes) == sum(tensor.nbytes for tensor in expected.values())
    for other_size, other in {saving, (2, "zero=3"), (4, "zero=3"), (1, "ddp"), (2, "ddp")}:
        for found in run_distributed(average, other_size, other, 1, str(directory), True):
            assert equal(found, expected)
