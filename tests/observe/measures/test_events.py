"""What happens to a run is written down by rank 0, whoever finds it out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from lockstep import Accelerator, DamageChecks
from lockstep.history import EVENTS, MEASURES, read_lines
from lockstep.observe.hang import WatchedRank, totals_of_ranks
from tests.command import LOCKSTEP
from tests.observe.hang.test_coordinator import FakePeer, Run
from tests.observe.measures.loops import train_on


def events_in(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / EVENTS) if line["event"] != "peak"]


def test_rank_0_is_told_of_what_all_ranks_do() -> None:
    run = Run()
    for turn in range(24):
        for rank, peer in enumerate(run.peers):
            local = 0.4 if rank == 2 else 0.1
            run.tell(
                peer, "heartbeat", ticks=turn, boundaries=2 * turn, slowest_s=0.6, step_s=0.6, local_s=local,
                own={"tokens": 10.0 + rank, "model": 100},
            )  # fmt: skip
        run.now += 0.5
        run.coordinator.tick(run.now)
    summaries = [message for message in run.peers[0].sent if message["kind"] == "watch.ranks"]
    assert summaries[-1]["local_s"] == [0.1, 0.1, 0.4]
    assert summaries[-1]["sums"] == {"tokens": 11.0 + 12.0, "model": 200.0}
    assert 11 <= len(summaries) <= 13  # once a second, of 12 s
    assert not any(message["kind"] in ("watch.ranks", "watch.news") for message in run.peers[1].sent)


def test_rank_0_is_told_of_a_hang() -> None:
    run = Run()
    run.wait(6)
    (news,) = [message for message in run.peers[0].sent if message["kind"] == "watch.news"]
    assert (news["event"], news["rank"], news["sentence"]) == ("hang", 1, run.said[0])


def watched(local_s: float, own: Any) -> WatchedRank:
    found = WatchedRank(FakePeer(), "host", 1, 0.0, 0.0)
    found.take_heartbeat({"local_s": local_s, "own": own}, 0.0)
    return found


def test_what_only_some_ranks_know_is_of_none() -> None:
    ranks = {0: watched(1.0, {"a": 1}), 1: watched(0.0, {"a": 2, "b": 3}), 2: watched(2.0, {"b": "x"})}
    assert totals_of_ranks(ranks, 4) == {"local_s": [1.0, None, 2.0, None], "sums": {}}
    assert totals_of_ranks({**ranks, 2: watched(2.0, {"a": 5.0})}, 3)["sums"] == {"a": 7.0}
    assert totals_of_ranks({1: watched(1.0, "nonsense")}, 2) == {"local_s": [None, 1.0], "sums": {}}


def test_damage_and_what_a_script_tells_are_events(tmp_path: Path) -> None:
    accelerator = Accelerator(run_dir=tmp_path, kwargs_handlers=[DamageChecks(bad_gradients="skip")])
    accelerator.measures.event("phase", name="warm up")
    train_on(accelerator, torch.nn.Linear(4, 1), [torch.full((2, 4), x) for x in (1.0, float("nan"), 1.0)])
    (damage,) = [event for event in events_in(tmp_path) if event["event"] == "damage"]
    assert "finite" in damage["sentence"]
    (phase,) = [event for event in events_in(tmp_path) if event["event"] == "phase"]
    assert (phase["name"], phase["step"], phase["attempt"]) == ("warm up", 0, 0)
    assert len(list(read_lines(tmp_path / MEASURES))) == 3


FAILS_ONCE = """
import sys
from pathlib import Path
import torch
from lockstep import Accelerator

folder = Path(sys.argv[1])
accelerator = Accelerator(run_dir=folder / "run")
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for number in range(4):
    accelerator.backward(model(torch.randn(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    if number == 2 and not (folder / "failed").exists():
        (folder / "failed").touch()
        raise RuntimeError("the first time")
accelerator.end_training()
"""


def test_a_restart_by_the_launcher_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ONCE)
    command = [*LOCKSTEP, "launch", "--cpu", "--nproc", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    done = subprocess.run(
        [*command, "--max-restarts", "1", str(script), str(tmp_path)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    names = [(event["attempt"], event["event"]) for event in events_in(tmp_path / "run")]
    assert names == [
        *((0, name) for name in ("start", "error", "end")),
        *((1, name) for name in ("restart", "start", "end")),
    ]
    restart = next(event for event in events_in(tmp_path / "run") if event["event"] == "restart")
    assert restart["reason"] == "restarted by the launcher"
    lines = list(read_lines(tmp_path / "run" / MEASURES))
    steps = [*((0, step) for step in (1, 2, 3)), *((1, step) for step in (1, 2, 3, 4))]
    assert [(line["attempt"], line["step"]) for line in lines] == steps
