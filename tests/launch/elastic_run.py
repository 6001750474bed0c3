"""A training script that saves at every step and writes down which samples it saw; its arguments say what goes wrong.

    elastic_run.py FOLDER SAMPLES PAUSE_S [FAULT:RANK:STEP ...]

With ``IN_MEMORY`` in the environment, it saves in memory; ``WORKERS`` are those of its loader. One fault a round, in
order: a signal's name or ``raise``, which comes to ``RANK`` after ``STEP``. While there is a file ``slow`` in the
folder, a step takes a second.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, NoCheckpointError, ProjectConfiguration

BATCH = 2


class Progress:
    def __init__(self) -> None:
        self.step = self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.samples = state["step"], state["samples"]


def fail(fault: str) -> None:
    if fault == "raise":
        raise ValueError("the injected error")
    os.kill(os.getpid(), signal.Signals[fault])
    time.sleep(0.2)


def main() -> None:
    folder, samples, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    round = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    fault, *place = [*sys.argv[4:], *["nothing:-1:-1"] * (round + 1)][round].split(":")
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.arange(samples, dtype=torch.float32)[:, None]
    workers = int(os.environ.get("WORKERS", "0"))
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH, shuffle=True, num_workers=workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    with suppress(NoCheckpointError):
        accelerator.load_state()
    rank = accelerator.process_index
    with open(folder / f"ledger-{round}-{rank}.jsonl", "a") as ledger:
        # the last checkpoint may be that of the last step
        for (batch,) in loader if progress.samples < samples else ():
            if [str(rank), str(progress.step)] == place:
                fail(fault)
            time.sleep(pause_s if not (folder / "slow").exists() else 1.0)
            loss = model(batch / samples).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            progress.samples += BATCH * accelerator.num_processes
            seen = [int(sample) for sample in batch.flatten().tolist()]
            line = {
                "step": progress.step,
                "world": accelerator.num_processes,
                "ids": seen,
                "time": time.time(),
                "is_fork": "lockstep.launch.fork_server" in sys.orig_argv,
            }
            ledger.write(json.dumps(line) + "\n")
            ledger.flush()
            accelerator.save_state(in_memory="IN_MEMORY" in os.environ)
            if rank == 0:
                (folder / "committed.part").write_text(f"{round} {progress.step} {time.time()}")
                (folder / "committed.part").rename(folder / "committed")
    if rank == 0:
        weights = accelerator.unwrap_model(model).state_dict()
        text = json.dumps({name: value.flatten().tolist() for name, value in weights.items()})
        (folder / "weights.json").write_text(text)
    accelerator.end_training()


if __name__ == "__main__":
    main()
