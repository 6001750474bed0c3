"""What only a CUDA device can show. Collected everywhere, run where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lockstep import Accelerator, DataLoaderConfiguration
from parallel import plain

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
