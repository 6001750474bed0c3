"""Dropout: equal masks where ranks hold the same, different ones where they hold parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import Activation
from lockstep.parallel import apply_activation_checkpointing
from lockstep.parallel.tensor import TensorOptions, tensor_parallel
from lockstep.runtime import start_runtime

WIDTH, HIDDEN, LENGTH = 8, 4096, 4


class Keep(nn.Module):
    """Keeps what passed through it."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN),
            nn.Dropout(0.5),
            Keep(),
            nn.Linear(HIDDEN, WIDTH),
            nn.Dropout(0.5),
            Keep(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    rank = start_runtime(cpu=True).rank
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for name, options, activation in (
        ("whole", {}, Activation.NONE),
        ("again", {}, Activation.FULL),
        ("chunks", {"sequence_parallel": True}, Activation.NONE),
        ("chunks again", {"sequence_parallel": True}, Activation.FULL),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 3))
        blocks = {f"0.{index}": block for index, block in enumerate(model[0])}
        tensor_parallel(model, mesh, TensorOptions(blocks=blocks, **options))
        apply_activation_checkpointing(model, activation, blocks)
        torch.manual_seed(100 + 10 * rank)  # each rank its own
        after = []
        for _ in range(2):
            y = model(torch.ones(2, LENGTH, WIDTH))
            after.append(torch.rand(()).item())
        mlp = model[0][0].mlp
        masks = (mlp[2].seen == 0, mlp[5].seen == 0)
        F.mse_loss(y, torch.zeros_like(y)).backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        found[name] = (y.detach(), *masks, gradients, after)
        model.eval()
        found[f"{name} eval"] = model(torch.ones(2, LENGTH, WIDTH)).detach()
    return found


def test_masks_follow_what_is_split(run_distributed) -> None:
    first, second = run_distributed(run, 2)
    for name in ("whole", "again", "chunks", "chunks again"):
        y, hidden, residual, gradients, after = first[name]
        other_y, other_hidden, other_residual, other_gradients, other_after = second[name]
        assert torch.equal(y, other_y), "ranks go on with different numbers"
        assert all(map(torch.equal, gradients, other_gradients))
        assert 0.4 < (hidden == other_hidden).float().mean() < 0.6  # of independent masks, half agree
        assert torch.equal(residual, other_residual) == ("chunks" not in name)
        assert len({*after, *other_after}) == 4  # the ranks' own random numbers go on
        assert torch.equal(first[f"{name} eval"], second[f"{name} eval"])
    for name in ("whole", "chunks"):
        again = "again" if name == "whole" else "chunks again"
        assert torch.equal(first[name][0], first[again][0])  # the same seed, the same masks
        torch.testing.assert_close(first[name][3], first[again][3])
    assert (first["whole"][2].float().mean() - 0.5).abs() < 0.2
