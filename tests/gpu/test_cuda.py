"""What only a CUDA device can show. Collected everywhere, run where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Accelerator, DataLoaderConfiguration
from parallel import plain
from tests.command import LOCKSTEP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is visible here"),
]


def train(precision: str) -> tuple[list[float], Accelerator]:
    accelerator = Accelerator(
        mixed_precision=precision,
        dataloader_config=DataLoaderConfiguration(data_seed=plain.SEED, non_blocking=True),
    )
    model = plain.make_model()
    optimizer = plain.make_optimizer("sgd", model)
    loader = DataLoader(plain.make_dataset("map"), batch_size=8, shuffle=True, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for tokens, labels in loader:
        assert tokens.is_cuda
        loss = F.cross_entropy(model(tokens), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if len(losses) == 20:
            break
    return torch.stack(losses).tolist(), accelerator


def test_training_on_the_gpu_gives_the_losses_of_plain_cpu_training() -> None:
    losses, _ = train("no")
    assert losses == pytest.approx(plain.train("map", "sgd", 1, 20, 8, False, 1).losses, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_on_the_gpu_stays_near_fp32(precision: str) -> None:
    losses, _ = train(precision)
    assert losses == pytest.approx(plain.train("map", "sgd", 1, 20, 8, False, 1).losses, rel=0.05)


def test_a_step_does_not_wait_for_the_gpu() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = plain.make_model()
    optimizer = plain.make_optimizer("adamw", model)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens, labels = (t[:8].to(accelerator.device) for t in plain.make_rows())
    for warm_up in (True, False):
        torch.cuda.set_sync_debug_mode("default" if warm_up else "error")
        try:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(tokens), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_world_of_one_under_nccl_gathers_tensors_and_objects(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from lockstep import Accelerator\n"
        "accelerator = Accelerator()\n"
        "assert 'nccl' in torch.distributed.get_backend_config().__str__()\n"
        "x = torch.ones(3, device=accelerator.device)\n"
        "assert accelerator.gather(x).sum().item() == 3\n"
        "assert accelerator.reduce(x, 'mean').sum().item() == 3\n"
        "accelerator.wait_for_everyone()\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        str(script),
    ]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("activation", ["full", "selective", "offload"])
def test_recomputation_on_the_gpu_keeps_losses_and_saves_memory(activation: str) -> None:
    def steps(parallel: str) -> tuple[list[float], int]:
        accelerator = Accelerator(parallel=parallel)
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        rows = torch.randn(4096, 256, device=accelerator.device, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        losses = []
        for _ in range(3):
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        peak = torch.cuda.max_memory_allocated()
        accelerator.free_memory()
        return losses, peak

    expected, most = steps("auto")
    losses, peak = steps(f"activation={activation}")
    assert losses == pytest.approx(expected, rel=1e-6)
    assert peak < most


SHARDED = """
import torch
from torch import nn
from lockstep import Accelerator

accelerator = Accelerator(parallel="{parallel}", mixed_precision="{precision}")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(accelerator.device)
first = None
for _ in range(20):
    loss = model(rows).square().mean()
    first = loss.item() if first is None else first
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
assert loss.item() < first / 2, (first, loss.item())
"""


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank, and two ranks to shard"
)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize(
    "parallel", ["zero=1", "zero=2", "zero=3", "zero=3 offload", "zero=3 quantized_weights"]
)
def test_every_stage_trains_over_nccl(parallel: str, precision: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHARDED.format(parallel=parallel, precision=precision))
    command = [*LOCKSTEP, "launch", "--nproc", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_run_on_the_gpu_goes_on_from_its_checkpoint(precision: str, blocking: bool, tmp_path: Path) -> None:
    def run(steps: int, load: bool = False, save_after: int = 0) -> list[float]:
        torch.manual_seed(5 if load else 0)
        accelerator = Accelerator(mixed_precision=precision)
        model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.GELU(), nn.Linear(64, 4))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        if load:
            accelerator.load_state(tmp_path / "state")
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).to(accelerator.device)
        losses = []
        for step in range(steps):
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step + 1 == save_after:
                accelerator.save_state(tmp_path / "state", blocking=blocking)
        accelerator.end_training()
        return losses

    whole = run(10, save_after=5)
    assert run(5, load=True) == whole[5:]
