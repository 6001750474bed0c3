"""A process of a tracked run: the first logs steps 0 to 9 and is killed, the second loads the checkpoint after step 4.

    python -m tests.observe.tracked_run first FOLDER wandb trackio

The second logs steps 5 and 6, with other values.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from lockstep import Accelerator


def main(session: str, folder: str, *names: str) -> None:
    is_second = session == "second"
    accelerator = Accelerator(log_with=list(names), project_dir=folder, cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    checkpoint = Path(folder, "checkpoint")
    if is_second:
        accelerator.load_state(checkpoint)
    options = {
        "wandb": {"mode": "offline", "dir": folder},
        "dvclive": {"dir": f"{folder}/dvclive", "save_dvc_exp": False, "report": None, "dvcyaml": None},
    }
    kwargs = {name: options[name] for name in names if name in options}
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs=kwargs)
    for step in (5, 6) if is_second else range(10):
        values: dict[str, object] = {"loss": step + (0.5 if is_second else 0.0)}
        if {"tensorboard", "jsonl"}.issuperset(names):
            values["lines"] = {"train": values["loss"]}
        accelerator.log(values, step=step)
        if step == 4:
            accelerator.save_state(checkpoint)
    if not is_second:
        # Services write in threads and processes of their own.
        time.sleep(float(os.environ.get("TRACKED_RUN_WAITS", "0")))
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
