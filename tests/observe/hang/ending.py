"""How a run ends: ``ending.py HOW OUT`` trains two steps on each rank, and then does what HOW says."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep import Accelerator

ALONE_S = 8.0  # longer than it takes to name a hang, and with --hang-timeout 1 to end the run


def train(accelerator: Accelerator) -> None:
    model, optimizer = torch.nn.Linear(2, 1), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()


def has_ended(out: Path, rank: int) -> bool:
    """Whether that rank's process is gone, or waits to be reaped."""
    pid = (out / f"pid-{rank}").read_text()
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def main() -> None:
    how, out = sys.argv[1], Path(sys.argv[2])
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    train(accelerator)
    if how == "export":
        accelerator.end_training()
        if rank == 0:
            while not has_ended(out, 1):
                time.sleep(0.01)
            began = time.monotonic()
            while time.monotonic() - began < ALONE_S:  # inside of torch, where a rank might seem to wait
                torch.ones(400, 400).matmul(torch.ones(400, 400))
            (out / "result").write_text("kept")
    elif how == "save":
        if rank == 0:
            accelerator.save_state(str(out / "checkpoint"))
    elif how == "exit":
        if rank == 1:
            os._exit(0)
        accelerator.gather(torch.ones(1))
    elif how == "collective" and rank == 0:
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
