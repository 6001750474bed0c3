"""Gradients in a file: the same values as in memory, and bounded memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import OffloadError
from lockstep.offload.files import ALIGNMENT, OffloadFile, region_of
from lockstep.offload.optimizer import GradientFile, norm_of, offload_step, scale_offloaded
from lockstep.offload.weights import find_weight_groups, stop_streaming, stream_weights
from tests.offload.optimizer.test_offloaded import Model, assert_same, batches, loss_of


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_accumulated_gradients_are_those_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, ours = Model(), Model()
    ours.load_state_dict(plain.state_dict())
    file = GradientFile(ours.parameters(), tmp_path)
    stepped = [p for p in ours.parameters() if p.requires_grad and p is not ours.unused]
    padded = sum(-(-p.numel() * 4 // ALIGNMENT) * ALIGNMENT for p in stepped)
    for window, set_to_none in enumerate((True, False, True)):
        for tokens in batches(3):
            for model in (plain, ours):
                loss_of(model, tokens).backward()
            assert_same(gradients(plain), gradients(ours))
            assert all(region_of(p.grad) for p in stepped if p.grad is not None)
        if window == 0:
            assert (file.file.bytes_read, file.file.bytes_written) == (2 * padded, 3 * padded)
        for model in (plain, ours):
            model.blocks[0].linear.weight.grad.mul_(0.5)
            loss_of(model, next(batches())).backward()
        assert_same(gradients(plain), gradients(ours))
        for model in (plain, ours):
            model.zero_grad(set_to_none)
            model.blocks[1].linear.bias.grad = torch.ones(35)  # one that is not in the file
        assert_same(gradients(plain), gradients(ours))
    file.close()
    ours.zero_grad()
    loss_of(ours, next(batches())).backward()
    assert region_of(ours.head.bias.grad) is None  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph_of_a_part_of_the_model_or_only_asked_for_stay_right(tmp_path: Path) -> None:
    def run(offloaded: bool) -> Any:
        torch.manual_seed(0)
        model = Model()
        if offloaded:
            GradientFile(model.parameters(), tmp_path)
        loss_of(model, next(batches())).backward()
        loss_of(model, next(batches())).backward(create_graph=True)
        first = [None if g is None else g.detach() for g in gradients(model)]
        model.zero_grad()
        loss_of(model, next(batches())).backward()
        model.head.bias.sum().backward()  # nothing else gets a gradient
        weight = model.blocks[0].linear.weight
        (asked,) = torch.autograd.grad(loss_of(model, next(batches())), weight)
        second = gradients(model)
        loss_of(model, next(batches())).backward(inputs=[weight])
        return first, asked, second, gradients(model)

    assert_same(run(False), run(True))


def clip_offloaded(parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    found = [p.grad for p in parameters if p.grad is not None]
    norm = norm_of(found, norm_type)
    scale_offloaded(found, max_norm, norm)
    return norm


@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.01), (1.0, 1e6), (float("inf"), 0.01)])
def test_clipping_is_that_of_torch_to_the_last_bit(norm_type: float, max_norm: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, ours = Model(), Model()
    ours.load_state_dict(plain.state_dict())
    file = GradientFile(ours.parameters(), tmp_path)
    for model in (plain, ours):
        loss_of(model, next(batches())).backward()
    written = file.file.bytes_written
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    assert torch.equal(expected, clip_offloaded(ours.parameters(), max_norm, norm_type))
    assert_same(gradients(plain), gradients(ours))
    assert (file.file.bytes_written > written) == (max_norm < 1)  # as somebody has looked at them
    ours.head.bias.grad.fill_(float("nan"))  # type: ignore[union-attr]
    assert clip_offloaded(ours.parameters(), max_norm, norm_type).isnan() or norm_type == float("inf")


def test_a_model_of_which_everything_is_on_disk_trains_to_the_same_bits(tmp_path: Path) -> None:
    def run(offloaded: bool) -> Any:
        torch.manual_seed(0)
        model = Model(width=256)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        clip: Any = nn.utils.clip_grad_norm_
        if offloaded:
            file = OffloadFile(tmp_path, 60 * ALIGNMENT + sum(p.numel() * 4 for p in model.parameters()))
            for p in model.parameters():
                p.data = file.tensor(file.place(p.numel() * 4), p.shape, p.dtype).copy_(p.data)
            groups = find_weight_groups(model, {f"blocks.{i}": block for i, block in enumerate(model.blocks)})
            GradientFile(model.parameters(), tmp_path)
            step = offload_step(optimizer, groups, tmp_path)
            stream_weights(model, groups, torch.device("cpu"), listeners=[step], ready=step.ready)
            clip = clip_offloaded
        losses = []
        for index, tokens in enumerate(batches(6)):
            loss = loss_of(model, tokens)
            loss.backward()
            losses.append(loss.item())
            if index % 2:
                clip(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        result = copy.deepcopy((losses, model.state_dict(), optimizer.state_dict()))
        stop_streaming(model)
        return result

    assert_same(run(False), run(True))


def test_a_disk_without_room_is_found_first(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="Cannot make an offload file"):
        GradientFile(Model().parameters(), Path("/proc/nowhere"))


MEMORY = """
import sys, torch
from torch import nn
from pathlib import Path
from lockstep.offload.files import OffloadFile
from lockstep.offload.optimizer import GradientFile
from lockstep.offload.optimizer import offload_step
from lockstep.offload.weights import WeightGroup

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

width, blocks, folder = 1024, 12, Path(sys.argv[1])
one = width * width * 4  # bytes of a block's weight
file = OffloadFile(folder, blocks * one)
model = nn.Sequential()
for i in range(blocks):
    layer = nn.Linear(width, width, bias=False)
    layer.weight.data = file.tensor(file.place(one), (width, width), torch.float32).copy_(layer.weight.data)
    model.append(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
groups = [WeightGroup(str(i), [layer], dict(layer.named_parameters()), one) for i, layer in enumerate(model)]
gradients = GradientFile(model.parameters(), folder)
step = offload_step(optimizer, groups, folder)
nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
torch.optim.AdamW([nn.Parameter(torch.ones(1))]).step()
import ctypes, torch._dynamo
ctypes.CDLL(None).malloc_trim(0)
before, peak = anonymous(), 0

def look(*_):
    global peak
    peak = max(peak, anonymous() - before)

compute, write = step._threads._compute, step._threads._write_back
step._threads._compute = lambda *args: (compute(*args), look())
for p in model.parameters():
    p.register_post_accumulate_grad_hook(look)
for _ in range(2):
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    step.finish()
    optimizer.zero_grad()
print(peak / one)
"""


def test_memory_is_that_of_three_blocks_however_many_there_are(tmp_path: Path) -> None:
    """Weight, gradient and two states of 12 blocks are 48 such tensors, of which three blocks are 12."""
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    # Three buffers of four tensors, the gradient that appears and the buffer through which it is written,
    # two new states of the first step, what the kernel needs on the way (two tensors), and freed memory.
    assert float(run.stdout) < 12 + 2 + 2 + 2 + 8
