"""One script, started in every way that people start scripts, gives the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

SCRIPT = """
import json, sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Accelerator, DataLoaderConfiguration


def main(out):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(data_seed=5))
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows = torch.arange(32 * 6).reshape(32, 6).float().sin()
    labels = torch.arange(32) % 3
    loader = DataLoader(
        TensorDataset(rows, labels), batch_size=8 // accelerator.num_processes, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for epoch in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if accelerator.is_main_process:
        with open(out, "w") as file:
            json.dump({"world": accelerator.num_processes, "losses": losses}, file)
"""

SPAWN = """
import os, socket, sys
import torch.multiprocessing as mp
from script import main


def worker(rank, port, out):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    main(out)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (port, sys.argv[1]), nprocs=2)
"""


def expected_losses() -> list[float]:
    """Plain torch, one process, whole batches in the order of torch's DistributedSampler."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows = torch.arange(32 * 6).reshape(32, 6).float().sin()
    labels = torch.arange(32) % 3
    losses = []
    for epoch in range(2):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(5 + epoch))
        for batch in order.split(8):
            loss = F.cross_entropy(model(rows[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


WAYS = {
    "plain python": (1, [sys.executable, "run.py"], ""),
    "mp.spawn": (2, [sys.executable, "spawn.py"], ""),
    "notebook": (
        2,
        [sys.executable, "-i", "-"],
        "from lockstep import notebook_launcher\n"
        "from script import main as imported\n"
        "def cell(out): imported(out)\n\n"
        "notebook_launcher(cell, ('{out}',), num_processes=2)\n",
    ),
}


# tests/test_readme.py starts a script by torchrun and by lockstep launch, an example of a docstring by debug_launcher.
@pytest.mark.parametrize("way", WAYS)
def test_a_script_gives_the_same_losses_however_it_is_started(way: str, tmp_path: Path) -> None:
    world, command, text = WAYS[way]
    out = tmp_path / "losses.json"
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "run.py").write_text("import sys\nfrom script import main\nmain(sys.argv[1])\n")
    (tmp_path / "spawn.py").write_text(SPAWN)
    done = subprocess.run(
        command if text else [*command, str(out)],
        input=text.format(out=out) if text else None,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert out.exists(), done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["world"] == world
    assert result["losses"] == pytest.approx(expected_losses(), rel=2e-6)
