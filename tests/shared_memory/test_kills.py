"""Ranks that are killed in the midst of collectives: the others say which, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep import shared_memory


def communicate(rank: int, ranks: int, folder: str) -> None:
    """Calls without end; what ends them goes into a file."""
    torch.set_num_threads(1)
    shared_memory.register()
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("shm", store=store, rank=rank, world_size=ranks)
    large, small = torch.ones(400_000), torch.ones(10)
    try:
        while True:
            pending = dist.all_reduce(large, async_op=True)
            dist.broadcast(small, 0)
            pending.wait()
            if rank < 2:
                dist.send(large, 1) if rank == 0 else dist.recv(large, 0)
            Path(folder, f"runs{rank}").touch()
    except RuntimeError as error:
        Path(folder, f"told{rank}").write_text(str(error))
        os._exit(3)


def train(rank: int, ranks: int, folder: str) -> None:
    """DDP, whose reducer is in C++ and waits for futures; rank 0 is killed before its third backward."""
    torch.set_num_threads(1)
    shared_memory.register()
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("shm", store=store, rank=rank, world_size=ranks)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    try:
        for step in range(5):
            loss = model(torch.ones(4, 8)).sum()
            if rank == 0 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
    except RuntimeError as error:
        Path(folder, f"told{rank}").write_text(str(error))
        os._exit(3)


def kill_in_training(ranks: int) -> list[str]:
    """What the other ranks are told."""
    # Not a fork of this process, in which a backward may have begun threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        started: list[Any] = [
            context.Process(target=train, args=(rank, ranks, folder), daemon=True) for rank in range(ranks)
        ]
        for one in started:
            one.start()
        for one in started:
            one.join(60)
        messages = {path.name: path.read_text() for path in sorted(Path(folder).glob("told*"))}
        assert [one.exitcode for one in started] == [-signal.SIGKILL, *[3] * (ranks - 1)], messages
        return list(messages.values())


@pytest.mark.parametrize("ranks", [2])
def test_a_backward_of_ddp_raises_where_a_rank_was_killed(run_distributed, ranks: int) -> None:
    (messages,) = run_distributed(kill_in_training, 1, ranks)
    assert all("has ended, while rank" in text and "all_reduce" in text for text in messages), messages
    assert any("Rank 0 has ended" in text for text in messages), messages


def kill_some(times: int, ranks: int, seed: int) -> list[tuple[int, list[str]]]:
    """Start ranks, kill one at a random time, so many times over: (who, what the others were told)."""
    draw, found = random.Random(seed), []
    context = multiprocessing.get_context("fork")
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            started: list[Any] = [
                context.Process(target=communicate, args=(rank, ranks, folder), daemon=True)
                for rank in range(ranks)
            ]
            for one in started:
                one.start()
            while len(list(Path(folder).glob("runs*"))) < ranks:
                time.sleep(0.01)
            time.sleep(draw.random() * 0.05)
            killed = draw.randrange(ranks)
            os.kill(started[killed].pid, signal.SIGKILL)
            for one in started:
                one.join(30)
            assert all(one.exitcode is not None for one in started), "somebody still waits"
            found.append(
                (killed, [Path(folder, f"told{rank}").read_text() for rank in others(killed, ranks)])
            )
    return found


def others(rank: int, ranks: int) -> Sequence[int]:
    return [other for other in range(ranks) if other != rank]


def check_kills(found: list[tuple[int, list[str]]]) -> None:
    for killed, messages in found:
        # Who waits for a rank that ended because of the killed one names that.
        assert any(f"Rank {killed} has ended" in text for text in messages), (killed, messages)
        assert all("has ended, while rank" in text for text in messages), (killed, messages)


def in_shared_memory() -> set[str]:
    """Files there, without those that other tests make: torch's and multiprocessing's."""
    with os.scandir("/dev/shm") as entries:
        return {one.name for one in entries if one.is_file() and not one.name.startswith(("torch_", "sem."))}


def test_a_killed_rank_is_named_and_leaves_nothing(run_distributed) -> None:
    before = in_shared_memory()
    (found,) = run_distributed(kill_some, 1, 4, 3, 0)
    check_kills(found)
    assert in_shared_memory() <= before
