"""A small training script for the tests of stop signals and hangs.

    training.py OUT [--steps N] [--pause S] [--hang RANK:STEP] [--plain]

Each rank appends a line to OUT/rank-R.txt for each step: the step and its samples. Saves every second step.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, NoCheckpointError, ProjectConfiguration


class Progress:
    """The script's own counter."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def slow_fetch() -> None:
    time.sleep(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--hang", default="")
    parser.add_argument("--plain", action="store_true", help="save nothing")
    args = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            args.out, automatic_checkpoint_naming=not args.plain, total_limit=3
        ),
    )
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    numbers = torch.arange(4 * accelerator.num_processes * args.steps, dtype=torch.float32)
    loader = DataLoader(TensorDataset(numbers), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if not args.plain:
        with contextlib.suppress(NoCheckpointError):
            accelerator.load_state()
    rank = accelerator.process_index
    with (args.out / f"rank-{rank}.txt").open("a") as ledger:
        for (batch,) in loader:
            if f"{rank}:{progress.step}" == args.hang:
                slow_fetch()
            accelerator.backward(model(batch[:, None].expand(-1, 3) / 100).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            print(progress.step, *(int(x) for x in batch), file=ledger, flush=True)
            if progress.step % 2 == 0 and not args.plain:
                accelerator.save_state()
            time.sleep(args.pause)
    accelerator.end_training()


if __name__ == "__main__":
    main()
