"""From the kill of a worker to the next committed step, with workers that are forks and with new processes.

    python benchmarks/restart_time.py
    python benchmarks/restart_time.py --quick

Two launches of 2 ranks take turns: one with --warm-restarts, the other without. Rank 1 is killed once its round has
saved. The clock stops when rank 0 has saved again. Whoever is not measured sleeps. On a busy machine the seconds of the
processor say more: what the new workers have used together until they saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import LOCKSTEP, Report, Trials, parse_for_trials, summary

RANKS, KILLS, QUICK_KILLS, LIMIT_S = 2, 12, 2, 180.0
SCRIPT = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Accelerator, NoCheckpointError, ProjectConfiguration

def main():
    folder, number = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"]
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(TensorDataset(torch.randn(100000, 16)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    try:
        accelerator.load_state()
    except NoCheckpointError:
        pass
    for count, (batch,) in enumerate(loader):
        if count == 1:
            break
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
        noted = {"time": time.monotonic(), "cpu_s": time.process_time(), "pid": os.getpid()}
        with open(f"{folder}/part-{os.environ['RANK']}", "w") as file:
            json.dump(noted, file)
        os.replace(file.name, f"{folder}/round-{number}-{os.environ['RANK']}")
    time.sleep(1e6)

main()
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Raises SystemExit when it takes too long."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {LIMIT_S:.0f} s.")
        time.sleep(0.005)


class Launch:
    """One launch whose rank 1 is killed again and again."""

    def __init__(self, folder: Path, script: Path, warm: bool) -> None:
        folder.mkdir()
        self._folder, self._round = folder, 0
        flags = ["--nproc", str(RANKS), "--cpu", "--max-restarts", "1000"]
        flags += ["--warm-restarts"] if warm else []
        command = [*LOCKSTEP, "launch", *flags, str(script), str(folder)]
        self._errors = (folder / "errors").open("w+")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stderr=self._errors, env=environment)
        self._wait_for_commit()

    def _notes(self, rank: int) -> dict[str, float]:
        found: dict[str, float] = json.loads((self._folder / f"round-{self._round}-{rank}").read_text())
        return found

    def _wait_for_commit(self) -> None:
        files = [self._folder / f"round-{self._round}-{rank}" for rank in range(RANKS)]
        wait_until(lambda: all(file.exists() for file in files), "a round's first step")

    def kill(self) -> tuple[float, float]:
        """Seconds from the kill to the next commit, and of the processor, which both ranks used for it."""
        struck = time.monotonic()
        os.kill(int(self._notes(1)["pid"]), 9)
        self._round += 1
        self._wait_for_commit()
        notes = [self._notes(rank) for rank in range(RANKS)]
        return notes[0]["time"] - struck, sum(note["cpu_s"] for note in notes)

    def end(self) -> None:
        """Raises SystemExit if a warm launch restarted otherwise."""
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()
        self._errors.close()
        if "--warm-restarts" in said:
            raise SystemExit(said)


def main() -> None:
    trials = Trials("kills", "kills of a launch", KILLS, QUICK_KILLS)
    arguments = parse_for_trials(__doc__ or "", "restart_time", trials)
    title = f"kill of a worker to the next committed step, {RANKS} ranks, {arguments.kills} kills each"
    report = Report("restart_time", title)
    found: dict[str, list[tuple[float, float]]] = {"warm": [], "cold": []}
    with tempfile.TemporaryDirectory(prefix="lockstep-restarts-") as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        launches: dict[str, Launch] = {}
        try:
            for kind in found:
                launches[kind] = Launch(Path(folder) / kind, script, kind == "warm")
            for _ in range(arguments.kills):
                for kind, launch in launches.items():
                    found[kind].append(launch.kill())
        finally:
            for launch in launches.values():
                launch.end()
    wall = {kind: summary([seconds for seconds, _ in values]) for kind, values in found.items()}
    cpu = {kind: summary([seconds for _, seconds in values]) for kind, values in found.items()}
    rows = [(kind, wall[kind].show(2), cpu[kind].show(2)) for kind in found]
    report.finish(
        ["restarts", "kill to commit, s", "processor time of both ranks, s"],
        rows,
        {
            "wall_s": {kind: one.to_dict() for kind, one in wall.items()},
            "cpu_s": {kind: one.to_dict() for kind, one in cpu.items()},
        },
        {"ranks": RANKS, "kills": arguments.kills},
        arguments.output,
    )


if __name__ == "__main__":
    main()
