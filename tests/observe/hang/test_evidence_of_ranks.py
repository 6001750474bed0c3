"""Ranks that really wait for each other: what each says of itself, and the sentence made of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from lockstep.observe.hang import Evidence, Finding, Silent, diagnose, gather_evidence, process_state
from lockstep.torch_internals import recorder_traces
from tests.patching import module_of

LOOK_AFTER_S = 0.15
GIVE_UP_S = 1.0
HERE = Path(__file__).name


def line_of(mark: str) -> int:
    """The number of this file's line that ends with the mark."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# <{mark}>")]
    return number


class Observed:
    """Runs a function in the main thread of each rank, and collects what each says of itself meanwhile.

    ``seen`` is set when both ranks have looked; ``folder`` is where they tell each other.
    """

    def __init__(self, folder: Path) -> None:
        self.rank, self.folder = dist.get_rank(), folder
        self.found: dict[str, tuple[dict[str, Any], float, str]] = {}
        self.pids: list[Any] = [None, None]
        self.seen = threading.Event()
        dist.all_gather_object(self.pids, os.getpid())

    def run(self, name: str, *functions: Callable[[], object]) -> None:
        self.seen.clear()
        dist.barrier()
        main = threading.get_ident()
        timer = threading.Timer(LOOK_AFTER_S, self._look, (name, main))
        timer.start()
        functions[self.rank]()
        timer.join()

    def _look(self, name: str, main: int) -> None:
        started = time.perf_counter()
        evidence = gather_evidence(self.rank, "here", 3, 5.0, main)
        seconds = time.perf_counter() - started
        state = process_state(self.pids[1 - self.rank]).word
        self.found[name] = (json.loads(json.dumps(evidence.to_message())), seconds, state)
        (self.folder / f"{name} {self.rank}").touch()
        other = self.folder / f"{name} {1 - self.rank}"
        while not other.exists():
            time.sleep(0.005)
        self.seen.set()

    def late(self, then: Callable[[], object] = lambda: None) -> Callable[[], None]:
        return lambda: slow_fetch(self.seen, then)

    def stop_until_seen(self) -> None:
        """Rank 0 cannot wait for what this rank says: it is stopped."""
        looked = str(self.folder / "stopped 0")
        wait = f'while [ ! -e "$0" ]; do sleep 0.02; done; kill -CONT {os.getpid()}'
        subprocess.Popen(["sh", "-c", wait, looked])
        os.kill(os.getpid(), signal.SIGSTOP)


def slow_fetch(seen: threading.Event, then: Callable[[], object]) -> None:
    seen.wait(20)  # <sleep>
    then()


class Slow(Dataset[int]):
    def __init__(self, seen: threading.Event | None = None) -> None:
        self.seen = seen

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        if self.seen is None:
            time.sleep(3 * LOOK_AFTER_S)
        else:
            self.seen.wait(20)  # <item>
        return index


def enter_all_reduce() -> None:
    dist.all_reduce(torch.ones(4))  # <all_reduce>


def wait_for_handle() -> None:
    handle = dist.all_reduce(torch.ones(2, 3, dtype=torch.float64), async_op=True)
    handle.wait()  # <wait>


def receive() -> None:
    dist.recv(torch.ones(1), 1)  # <recv>


def receive_later() -> None:
    handle = dist.irecv(torch.ones(1), 1)
    handle.wait()  # <irecv>


def load_by_workers() -> None:
    for _ in DataLoader(Slow(), num_workers=1):  # <loader>
        pass


def situations(folder: str) -> list[tuple[str, dict[str, Any], float, str]]:
    dist.init_process_group("gloo")
    observed = Observed(Path(folder))
    late = observed.late
    observed.run("all_reduce", enter_all_reduce, late(enter_all_reduce))
    observed.run("wait", wait_for_handle, late(wait_for_handle))
    observed.run("recv", receive, late(lambda: dist.send(torch.ones(1), 0)))
    observed.run("irecv", receive_later, late(lambda: dist.send(torch.ones(1), 0)))
    with mock.patch.object(module_of(recorder_traces), "recorder_traces", return_value=()):
        observed.run("unrecorded", enter_all_reduce, late(enter_all_reduce))
    pair = dist.new_group([0, 1])

    def subgroup() -> None:
        dist.broadcast(torch.ones(4), 1, group=pair)  # <subgroup>

    observed.run("subgroup", subgroup, late(subgroup))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(1, 4)).sum()

    def backward() -> None:
        loss.backward()  # <backward>

    observed.run("backward", backward, late(backward))
    observed.run("loader", enter_all_reduce, lambda: (load_by_workers(), enter_all_reduce()))
    observed.run(
        "item", enter_all_reduce, lambda: (list(DataLoader(Slow(observed.seen))), enter_all_reduce())
    )
    sharded = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    sharded(torch.ones(1, 4)).sum().backward()

    def forward() -> None:
        sharded(torch.ones(1, 4))  # <forward>

    observed.run("forward", forward, late(forward))

    observed.run("stopped", enter_all_reduce, lambda: (observed.stop_until_seen(), enter_all_reduce()))

    # A group in which waiting ends, so that what cannot end does.
    limit = timedelta(seconds=GIVE_UP_S)
    first = dist.new_group([0, 1], timeout=limit)

    def enter(call: Callable[[], object]) -> Callable[[], object]:
        def fail() -> None:
            with suppress(RuntimeError):
                call()

        return fail

    def sum_in_first() -> None:
        dist.all_reduce(torch.ones(4), group=first)  # <first>

    def copy_in_first() -> None:
        dist.all_gather([torch.ones(8), torch.ones(8)], torch.ones(8), group=first)  # <other>

    observed.run("mismatch", enter(sum_in_first), enter(copy_in_first))
    dist.destroy_process_group()
    return [(name, *found) for name, found in observed.found.items()]


def test_ranks_that_wait_are_explained_with_rank_operation_number_and_lines(
    run_distributed: Callable[..., list[Any]], tmp_path: Path
) -> None:
    results = run_distributed(situations, 2, str(tmp_path))
    findings: dict[str, Finding] = {}
    (seen_state,) = [state for name, _, _, state in results[0] if name == "stopped"]
    for (name, first, slow, _), (_, second, also_slow, _) in zip(*results, strict=True):
        evidence = [Evidence.from_message(first), Evidence.from_message(second)]
        assert slow < 1 and (also_slow < 1 or name == "stopped"), name
        assert all(0 < len(one.stack) <= 8192 for one in evidence)
        other = Silent(1, "here", evidence[1].pid, 5.0, seen_state) if name == "stopped" else evidence[1]
        findings[name] = diagnose([evidence[0], other], 2)

    def at(mark: str) -> str:
        return rf"at \S*{HERE}:{line_of(mark)}"

    def check(name: str, pattern: str, cause: str = "missing", ranks: tuple[int, ...] = (1,)) -> None:
        one = findings[name]
        assert re.match(pattern, one.sentence), (pattern, one.sentence)
        assert (one.cause, one.ranks) == (cause, ranks)

    def joined(operation: str, mark: str, number: str = r"\d+", called: str = "") -> str:
        call = rf" \({called}\)" if called else ""
        return rf"rank 1 never joined {operation} #{number}{call} that rank 0 entered {at(mark)}; "

    sleeps = rf"rank 1 is {at('sleep')} in slow_fetch\. "
    # Collectives of the main group: two for the pids, a barrier before each situation, and those of the situations.
    check("all_reduce", joined("all_reduce", "all_reduce", "4") + sleeps)
    check("wait", joined("all_reduce", "wait", "6") + sleeps)
    check("recv", rf"rank 1 never sent what rank 0 waits for {at('recv')}; " + sleeps)
    check("irecv", rf"rank 1 never took part in .* rank 0 waits {at('irecv')}; " + sleeps)
    unrecorded = rf"rank 1 never joined all_reduce that rank 0 entered {at('all_reduce')}; "
    check("unrecorded", unrecorded + sleeps)
    check("subgroup", joined("broadcast", "subgroup", "1") + sleeps)
    check("backward", joined("all_reduce", "backward", called="backward") + sleeps)
    check("forward", joined("all_gather", "forward", called="forward") + sleeps)
    workers = (
        rf"rank 1 is {at('loader')} in load_by_workers, waiting for its data-loader workers \(pid \d+\)\. "
    )
    check("loader", joined("all_reduce", "all_reduce") + workers, "data")
    check("item", joined("all_reduce", "all_reduce") + rf"rank 1 is {at('item')} in Slow.__getitem__\. ")
    waits = rf"rank 1 is stopped \(.*\), and rank 0 waits for it in all_reduce #\d+ {at('all_reduce')}\. "
    check("stopped", waits, "stopped")
    differ = (
        r"the ranks are in different collectives: rank 0 in all_reduce #1 of float32 \[4\] "
        rf"{at('first')}, rank 1 in all_gather #1 of float32 \[8\] {at('other')}\. "
    )
    check("mismatch", differ, "mismatch", (0, 1))
