"""The run of a soak: trains, saves, writes down what it sees, and does to itself what a plan says.

    training.py DIRECTORY

``DIRECTORY/plan.json`` has the number of steps and the faults. A fault strikes once: a file says that it has. The
disk that gets full is ``DIRECTORY/disk``, where the checkpoints are.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, NoCheckpointError, ProjectConfiguration

BATCH, FEATURES, SAVE_EVERY = 4, 16, 10


class Progress:
    """The script's own counter."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def send(pid: int, number: int) -> None:
    os.kill(pid, number)


def fill(disk: Path) -> None:
    """Leave no room."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def strike(kind: str, number: int, disk: Path) -> None:
    launcher = os.getppid()
    if kind == "kill worker":
        send(os.getpid(), signal.SIGKILL)
    elif kind == "kill launcher":
        send(launcher, signal.SIGKILL)
    elif kind == "stop worker":
        send(os.getpid(), signal.SIGSTOP)
    elif kind == "exception":
        raise RuntimeError(f"injected error {number}")
    elif kind == "full disk":
        fill(disk)
    else:
        name, _, where = kind.partition(" to ")
        send(launcher if where == "launcher" else os.getpid(), signal.Signals[name])


def main() -> None:
    directory = Path(sys.argv[1])
    plan = json.loads((directory / "plan.json").read_text())
    disk = directory / "disk"
    torch.manual_seed(0)
    project = ProjectConfiguration(str(disk / "run"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    if rank == 0:
        (disk / "filler").unlink(missing_ok=True)  # somebody has tidied up
    accelerator.wait_for_everyone()
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = torch.arange(plan["steps"] * BATCH * world_size // 2, dtype=torch.float32)  # two epochs
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    with suppress(NoCheckpointError):
        accelerator.load_state()
    faults = {fault["step"]: fault for fault in plan["faults"] if fault["rank"] == rank}
    powers = torch.arange(1, FEATURES + 1) / FEATURES
    with (directory / f"ledger-{rank}.jsonl").open("a") as ledger:
        while progress.step < plan["steps"]:
            for (numbers,) in loader:
                fault = faults.get(progress.step)
                mark = directory / f"fault-{fault['number']}" if fault else None
                if fault and mark and not mark.exists():
                    mark.write_text(repr(time.monotonic()))
                    if fault["kind"] == "exception":
                        strike("exception", fault["number"], disk)
                    arguments = (fault["kind"], fault["number"], disk)
                    threading.Timer(fault["delay_s"], strike, arguments).start()
                noise = torch.rand(len(numbers), 1)  # the generators must continue, too
                output = model((numbers[:, None] / len(rows)) ** powers + 0.01 * noise)
                accelerator.backward((output - torch.sin(numbers[:, None])).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                progress.step += 1
                line = [progress.step, *(int(number) for number in numbers)]
                ledger.write(json.dumps(line) + "\n")
                ledger.flush()
                time.sleep(plan["pause_s"])
                if progress.step % SAVE_EVERY == 0:
                    accelerator.save_state()
                    if rank == 0:
                        with (directory / "commits").open("a") as commits:
                            commits.write(f"{progress.step} {time.monotonic()!r}\n")
    if rank == 0:
        weights = accelerator.unwrap_model(model).state_dict()
        torch.save(weights, directory / "weights.pt")
        (directory / "complete").touch()
    accelerator.end_training()


if __name__ == "__main__":
    main()
