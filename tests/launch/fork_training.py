"""Trains, saves at every step, and fails when a test says so: on rank R in round N at the file ``fail-N-R``.

    fork_training.py FOLDER ROUNDS

The last of the rounds makes 4 more steps and ends. Rank 0 notes the weights and, of each step of each round, which
samples it saw and whether its process was a fork.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, NoCheckpointError, ProjectConfiguration

STEPS_OF_A_ROUND = 4


class Progress:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    project = ProjectConfiguration(str(folder / "run"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    rank, world = accelerator.process_index, accelerator.num_processes
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(
        TensorDataset(torch.arange(4096.0).view(-1, 4) / 4096), batch_size=2, shuffle=True, num_workers=1
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    with suppress(NoCheckpointError):
        accelerator.load_state()
    last = progress.step + STEPS_OF_A_ROUND
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        accelerator.save_state()
        is_fork = "lockstep.launch.fork_server" in sys.orig_argv
        print(json.dumps([number, rank, progress.step, is_fork, batch.flatten().tolist(), world]), flush=True)
        if progress.step == last:
            break
    if number < rounds - 1:
        for (_,) in loader:  # a boundary, so that all are past the step before they wait
            break
        (folder / f"waits-{number}-{rank}").touch()
        while not (folder / f"fail-{number}-{rank}").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), 9)
    if rank == 0:
        weights = [
            value.flatten().tolist() for value in accelerator.unwrap_model(model).state_dict().values()
        ]
        (folder / "weights.json").write_text(json.dumps(weights))
    accelerator.end_training()


if __name__ == "__main__":
    main()
