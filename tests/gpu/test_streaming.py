"""Weights and activations that move between host memory and a GPU: the numbers and the bytes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.config import Activation
from lockstep.model import find_blocks
from lockstep.offload.weights import find_weight_groups, stop_streaming, stream_weights
from lockstep.parallel import apply_activation_checkpointing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is visible here"),
]

WIDTH, COUNT, ROWS = 512, 8, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("recomputed", [False, True])
def test_streamed_training_has_the_losses_and_gradients_of_the_model_on_the_gpu(
    pinned: bool, recomputed: bool
) -> None:
    model = Net()
    plain = copy.deepcopy(model).cuda()
    if pinned:
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()
    if recomputed:
        apply_activation_checkpointing(model, Activation.FULL, find_blocks(model))
    block_bytes = sum(p.nbytes for p in model.layers[0].parameters())
    streamer = stream_weights(
        model, find_weight_groups(model, find_blocks(model)), torch.device("cuda"), 4 * block_bytes
    )
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (model, plain)]
    kept: list[torch.Tensor] = []
    for step in range(3):
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            for micro in range(2):
                net(rows(2 * step + micro)).square().mean().backward()
            if net is plain:
                for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(
                        kept[ours], theirs.grad.cpu(), rtol=0 if step == 0 else 1e-3, atol=1e-6
                    )
            else:
                kept = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    assert 0 < streamer.mover.slots.peak_bytes <= 4 * block_bytes
    stop_streaming(model)
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_streamed_inference_keeps_its_budget_and_has_the_same_numbers() -> None:
    model = Net().eval()
    x = rows()
    with torch.inference_mode():
        plain = copy.deepcopy(model).cuda()
        expected = plain(x)
        del plain
        torch.cuda.synchronize()
        block_bytes = sum(p.nbytes for p in model.layers[0].parameters())
        stream_weights(
            model,
            find_weight_groups(model, find_blocks(model)),
            torch.device("cuda"),
            3 * block_bytes,
            ahead=1,
        )
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            assert torch.equal(model(x), expected)
    activations = ROWS * WIDTH * 4 * 12
    assert torch.cuda.max_memory_allocated() - before < 3 * block_bytes + activations + 2**20
    stop_streaming(model)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_activations_in_host_memory_leave_the_gpu_and_give_the_same_gradients() -> None:
    models = {mode: Net().cuda() for mode in (Activation.FULL, Activation.OFFLOAD)}
    kept = {}
    for mode, model in models.items():
        apply_activation_checkpointing(model, mode, find_blocks(model))
        for seed in range(3):
            x = rows(seed).requires_grad_()
            before = torch.cuda.memory_allocated()
            torch.cuda.set_sync_debug_mode("error" if seed == 2 else "default")
            try:
                loss = model(x).square().mean()
                kept[mode] = torch.cuda.memory_allocated() - before
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    input_bytes = ROWS * WIDTH * 4
    assert kept[Activation.FULL] - kept[Activation.OFFLOAD] >= (COUNT - 2) * input_bytes
    for ours, theirs in zip(*(model.parameters() for model in models.values()), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
