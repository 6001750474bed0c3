"""A small training on two processes, and the same by plain torch in one."""

from __future__ import annotations

import json
from pathlib import Path

import torch

EXIT_CODE = 3
SCRIPT = """
import json, os, sys, torch
from lockstep import Accelerator
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model, loss = accelerator.prepare(torch.nn.Linear(3, 1)), torch.nn.functional.mse_loss
optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
row = torch.arange(3.0) + accelerator.process_index
for _ in range(3):
    accelerator.backward(loss(model(row[None]), torch.zeros(1, 1)))
    optimizer.step(); optimizer.zero_grad()
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
weights = [value.tolist() for value in accelerator.unwrap_model(model).state_dict().values()]
with open(f"out-{accelerator.process_index}.json", "w") as file:
    json.dump([ranks, weights, sys.argv[1:], sorted(name for name in os.environ if "HF_" in name)], file)
print("trained", accelerator.process_index, flush=True)
accelerator.end_training()
sys.exit(3 if accelerator.process_index == 1 else 0)
"""


def write_script(folder: Path) -> None:
    """``train.py``; its rank 1 ends with ``EXIT_CODE``."""
    (folder / "train.py").write_text(SCRIPT)


def check_results(folder: Path, words: list[str]) -> None:
    """Both ranks saw each other, got the arguments ``words`` and no secret, and have the weights of plain torch."""
    results = [json.loads((folder / f"out-{rank}.json").read_text()) for rank in range(2)]
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    rows = torch.stack([torch.arange(3.0) + rank for rank in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(rows), torch.zeros(2, 1)).backward()
        optimizer.step()
    for ranks, weights, arguments, secrets in results:
        assert (ranks, arguments, secrets) == ([0, 1], words, [])
        for found, expected in zip(weights, model.state_dict().values(), strict=True):
            torch.testing.assert_close(torch.tensor(found), expected)
