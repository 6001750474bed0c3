"""A save in the background writes the bytes that a blocking one writes, whatever is done to the state meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep import Accelerator
from lockstep.checkpoint import SMALL_BYTES, DeferredCopies, save_checkpoint
from lockstep.checkpoint.store import LocalStore
from lockstep.comm import local
from lockstep.errors import LockstepError, UsageError
from tests.patching import module_of

WIDTH, LARGE = 8, SMALL_BYTES // 4 + 100
"""``LARGE`` elements are more than is copied at once."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class Net(nn.Module):
    """Blocks and, with ``has_buffers``, what a forward changes: a small buffer of BatchNorm and a large one."""

    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.BatchNorm1d(WIDTH) if has_buffers else nn.Identity()
        if has_buffers:
            self.register_buffer("seen", torch.zeros(LARGE))
        self.has_buffers = has_buffers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.has_buffers:
            self.seen += 1
        return self.norm(x)


class Sums:
    """A registered object whose tensor is too large to be copied at once."""

    def __init__(self, rank: int) -> None:
        self.sums = torch.full((LARGE,), float(rank))

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = state["sums"].clone()


class Run:
    """``divided``: the model is one of which ranks have parts, and has no buffers."""

    def __init__(self, parallel: str | None, precision: str = "no", window: int = 1) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.accelerator = Accelerator(
            cpu=True, parallel=parallel, mixed_precision=precision, gradient_accumulation_steps=window
        )
        self.divided = any(word in (parallel or "") for word in ("tp", "pp"))
        model = Net(not self.divided)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.average = None if self.divided else AveragedModel(model)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.sums = Sums(self.accelerator.process_index)
        self.accelerator.register_for_checkpointing(self.sums)
        if self.average is not None:
            self.accelerator.register_for_checkpointing(self.average)

    def backward(self) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(torch.randn(4, WIDTH)).square().mean()
            self.accelerator.backward(loss)
            self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.sums.sums += 1
        if self.average is not None:
            for value in self.average.parameters():
                value.data.mul_(0.9)

    def tensors(self) -> list[torch.Tensor]:
        """All that a checkpoint has of this rank."""
        plain = self.accelerator.unwrap_model(self.model)
        found = [*plain.parameters(), *plain.buffers(), self.sums.sums]
        found += [] if self.average is None else list(self.average.parameters())
        found += [value for values in self.optimizer.state.values() for value in values.values()]
        return found + [p.grad for p in plain.parameters() if p.grad is not None]


def content(directory: str | Path) -> dict[str, bytes]:
    """All but the manifest, which tells the time."""
    return {
        path.name: path.read_bytes() for path in Path(directory).iterdir() if path.name != "manifest.json"
    }


@contextmanager
def held(name: str = "copy", of: Any = DeferredCopies) -> Iterator[threading.Event]:
    """The thread that saves stops before this function until the event is set; the main thread passes."""
    release, original = threading.Event(), getattr(of, name)

    def function(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            release.wait()
        return original(*args)

    with mock.patch.object(of, name, function):
        try:
            yield release
        finally:
            release.set()


def by_hand(run: Run) -> None:
    """Ways to change a tensor, most of which no version counter tells."""
    ways: list[Callable[[torch.Tensor], object]] = [
        lambda tensor: tensor.data.fill_(7),
        lambda tensor: tensor.detach().numpy().fill(7),
        lambda tensor: tensor.detach().zero_(),
        lambda tensor: tensor.data.copy_(torch.full_like(tensor.data, 7)),
        lambda tensor: tensor.detach().view(-1)[:1].add_(7),
    ]
    with torch.no_grad():
        for number, tensor in enumerate(run.tensors()):
            part = local(tensor)
            if part.numel():
                ways[number % len(ways)](part)


def trains(run: Run) -> None:
    for _ in range(2):
        run.backward()


def saves_alike(directory: str, parallel: str | None, options: dict[str, Any], open_at: int) -> list[Any]:
    """A blocking save, one in the background, and a change at once; then what was loaded of the latter is looked at.

    The first in a run plans files before it returns; the later ones leave that to the thread, which is held up.
    """
    run = Run(parallel, **options)
    for _ in range(2 * options.get("window", 1) + open_at):
        run.backward()
    found = []
    for number, (plans_at_once, change) in enumerate(ROUNDS):
        run.accelerator.save_state(f"{directory}/{number}-blocking")
        if plans_at_once:
            run.accelerator._checkpointer.planner._plan = None
        with held() as copies, held("plan_files", of=module_of(save_checkpoint)) as planning:
            run.accelerator.save_state(f"{directory}/{number}-background", blocking=False)
            at_once = run.accelerator._checkpointer.background.copies.bytes_at_once  # type: ignore[union-attr]
            before = [local(tensor).clone() for tensor in run.tensors()]
            if change is trains:  # which waits for the copies
                planning.set()
                copies.set()
            change(run)
            planning.set()
            copies.set()
            run.accelerator.wait_for_checkpoint()
        changed = count_different(before, run)
        run.accelerator.load_state(f"{directory}/{number}-background")
        found.append((at_once, changed, count_different(before, run)))
    return found


def count_different(before: list[torch.Tensor], run: Run) -> int:
    now = run.tensors()  # gradients come last, and may be fewer
    return sum(not torch.equal(a, local(b)) for a, b in zip(before, now, strict=False))


ROUNDS = [(True, by_hand), (False, trains), (False, by_hand)]
CASES = [
    (1, "offload=optimizer", {}, 0),
    (1, None, {"window": 3}, 2),
    (2, None, {"window": 3}, 1),
    (2, "zero=1", {"precision": "fp16"}, 0),
    (2, "zero=2", {}, 0),
    (2, "zero=3", {}, 0),
    (2, "tp=2", {}, 0),
    (2, "pp=2", {}, 0),
]


@pytest.mark.parametrize(("world_size", "parallel", "options", "open_at"), CASES)
def test_the_bytes_are_those_of_a_blocking_save_of_the_same_state(
    run_distributed: Any,
    tmp_path: Path,
    world_size: int,
    parallel: str | None,
    options: dict[str, Any],
    open_at: int,
) -> None:
    ranks = run_distributed(saves_alike, world_size, str(tmp_path), parallel, options, open_at)
    for found in ranks:
        for at_once, changed, differ_once_loaded in found:
            assert at_once < SMALL_BYTES
            assert changed > 8
            assert differ_once_loaded == 0
    for number in range(len(ROUNDS)):
        background, blocking = (content(tmp_path / f"{number}-{kind}") for kind in ("background", "blocking"))
        assert background.keys() == blocking.keys()
        assert [name for name in background if background[name] != blocking[name]] == []


def waits(directory: str) -> tuple[bool, bool]:
    """A step while the copies are held up, which a timer ends."""
    run = Run(None)
    run.backward()
    large = nn.Parameter(torch.zeros(LARGE))
    optimizer = run.accelerator.prepare(torch.optim.SGD([large], lr=0.1))
    large.grad = torch.ones(LARGE)
    before = large.data_ptr()
    with held() as copies:
        run.accelerator.save_state(directory, blocking=False)
        timer = threading.Timer(0.3, copies.set)
        timer.start()
        optimizer.step()
        has_waited = copies.is_set()
    run.accelerator.wait_for_checkpoint()
    return has_waited, large.data_ptr() == before


def test_a_step_waits_for_copies_and_writes_where_its_memory_was(
    run_distributed: Any, tmp_path: Path
) -> None:
    assert run_distributed(waits, 1, str(tmp_path / "state")) == [(True, True)]


def of_numpy(directory: str) -> list[bool]:
    """Weights in memory that is not torch's, which nothing can keep while it is changed."""
    run = Run(None)
    held_by_numpy = np.arange(LARGE, dtype=np.float32)
    run.sums.sums = torch.from_numpy(held_by_numpy)
    found = []
    for number in range(2):
        expected = run.sums.sums.clone()
        with held():
            run.accelerator.save_state(f"{directory}/{number}", blocking=False)
            held_by_numpy += 1
        run.accelerator.wait_for_checkpoint()
        held_by_numpy[:] = -1
        run.accelerator.load_state(f"{directory}/{number}")
        found.append(torch.equal(run.sums.sums, expected))
        held_by_numpy[:] = number
        run.sums.sums = torch.from_numpy(held_by_numpy)
    return found


@pytest.mark.parametrize("world_size", [2])
def test_memory_that_is_not_torchs_is_copied_at_once(
    run_distributed: Any, tmp_path: Path, world_size: int
) -> None:
    assert run_distributed(of_numpy, world_size, str(tmp_path)) == [[True, True]] * world_size


def fails_to_copy(directory: str) -> tuple[bool, str, list[str]]:
    run = Run("zero=2")
    run.backward()
    run.accelerator.save_state(f"{directory}/first")
    with pytest.raises(LockstepError, match="is no checkpoint"):  # at once
        run.accelerator.save_state(directory, blocking=False)
    rank, original = run.accelerator.process_index, DeferredCopies.copy

    def copy(self: DeferredCopies) -> None:
        if rank == 1:
            raise MemoryError("no memory for a copy")
        original(self)

    error = ""
    with mock.patch.object(DeferredCopies, "copy", copy):
        run.accelerator.save_state(f"{directory}/second", blocking=False)
        thread = run.accelerator._checkpointer.background._thread
        assert thread is not None
        run.backward()  # waits for nothing that will not come
        thread.join()
        try:
            run.accelerator.save_state(f"{directory}/third")
        except LockstepError as failure:
            error = str(failure)
    run.accelerator.wait_for_everyone()
    there = sorted(path.name for path in Path(directory).iterdir())
    run.accelerator.wait_for_everyone()
    run.accelerator.save_state(f"{directory}/fourth", blocking=False)
    run.accelerator.load_state(f"{directory}/fourth")
    return run.accelerator._step.being_saved is None, error, there


def test_a_copy_that_fails_is_raised_by_the_next_call_and_stops_no_step(
    run_distributed: Any, tmp_path: Path
) -> None:
    for is_over, error, there in run_distributed(fails_to_copy, 2, str(tmp_path)):
        assert is_over
        assert "second, which was being saved in the background, was not saved" in error
        assert "no memory for a copy" in error
        assert there == ["first"]


def priorities(directory: str) -> tuple[int, set[int], int]:
    run = Run(None)
    seen: set[int] = set()
    original = LocalStore.write

    def write(self: LocalStore, path: str, chunks: Any) -> Any:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return original(self, path, chunks)

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with mock.patch.object(LocalStore, "write", write):
        run.accelerator.save_state(directory, blocking=False)
        run.accelerator.wait_for_checkpoint()
    return before, seen, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_files_are_written_by_threads_that_yield_to_training(run_distributed: Any, tmp_path: Path) -> None:
    ((before, writing, after),) = run_distributed(priorities, 1, str(tmp_path / "state"))
    assert before == after
    assert writing == {min(before + 10, 19)}


def frozen_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(LARGE, 1), nn.Linear(1, LARGE).requires_grad_(False))
    model.register_buffer("table", torch.arange(float(LARGE)))
    return model


@pytest.mark.parametrize("name", ["0.weight", "table"])
def test_memory_that_is_freed_during_a_save_is_saved_as_it_was(tmp_path: Path, name: str) -> None:
    accelerator, plain = Accelerator(cpu=True), frozen_model()
    accelerator.prepare(plain, torch.optim.SGD(plain[0].parameters(), 0.1))
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    expected = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    accelerator.save_state(tmp_path / "saved", blocking=False)
    tensors[name].untyped_storage().resize_(0)
    accelerator.wait_for_checkpoint()
    other = Accelerator(cpu=True)
    found = frozen_model()
    other.prepare(found, torch.optim.SGD(found[0].parameters(), 0.1))
    other.load_state(tmp_path / "saved")
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.state_dict().items())


def test_a_resized_storage_is_named_by_our_sentence(tmp_path: Path) -> None:
    accelerator, plain = Accelerator(cpu=True), frozen_model()
    accelerator.prepare(plain, torch.optim.SGD(plain[0].parameters(), 0.1))
    accelerator.save_state(tmp_path / "saved", blocking=False)
    storage = plain[0].weight.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    with pytest.raises(UsageError, match=r"resize_.*wait_for_checkpoint"):
        accelerator.wait_for_checkpoint()
