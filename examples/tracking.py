"""Tracking: TensorBoard, a JSON-lines file, and a tracker of one's own, fed by the same `accelerator.log`.

    python examples/tracking.py --out runs/tracking
    tensorboard --logdir runs/tracking

On several processes only the main one writes.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.tracking import GeneralTracker, on_main_process


class CSVTracker(GeneralTracker):
    """One row per value. A tracker has three attributes, and the methods that it cares about."""

    name = "csv"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @on_main_process
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("w", newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerow(["step", "name", "value"])

    @property
    def tracker(self) -> TextIO:
        return self.file

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.writer.writerows([step, name, value] for name, value in values.items())

    @on_main_process
    def finish(self) -> None:
        self.file.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/tracking"))
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    trackers = ["tensorboard", "jsonl", CSVTracker(args.out / "values.csv")]
    accelerator = Accelerator(split_batches=True, log_with=trackers, project_dir=args.out)
    accelerator.init_trackers("diabetes", config={"epochs": args.epochs, "learning_rate": 0.02})

    torch.manual_seed(0)
    inputs, targets = (torch.as_tensor(array).float() for array in load_diabetes(return_X_y=True))
    data = TensorDataset(inputs / inputs.std(dim=0), (targets - targets.mean()) / targets.std())
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(data, batch_size=34, shuffle=True),  # 442 patients: 13 batches
    )

    step = 0
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).squeeze(1), y)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            mean_loss = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.log({"loss": mean_loss, "epoch": epoch}, step=step)
        accelerator.print(f"epoch {epoch + 1}: loss of the last batch {mean_loss:.3f}")

    if accelerator.is_main_process:  # a tracker can also be used directly
        accelerator.get_tracker("csv").writer.writerow([step, "note", "done"])
    accelerator.end_training()
    accelerator.print(f"{step} steps logged to {args.out}")


if __name__ == "__main__":
    main()
