"""A training script that people look on.

    looked_at.py OUT

Trains until it is stopped. Each rank appends the number of each step to OUT/rank-R.txt.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, ProjectConfiguration


class Steps:
    """The script's own counter."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def wait_for_the_next() -> None:
    time.sleep(0.02)


def main() -> None:
    out = Path(sys.argv[1])
    torch.manual_seed(0)
    project = ProjectConfiguration(out, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model, loader = torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(10**6, 1)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    rank = accelerator.process_index

    with (out / f"rank-{rank}.txt").open("a") as ledger:
        for (batch,) in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps.done += 1
            print(steps.done, file=ledger, flush=True)
            wait_for_the_next()


if __name__ == "__main__":
    main()
