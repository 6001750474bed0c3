"""Inputs of blocks in host memory: what is copied when, what waits for what, and what is freed."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lockstep.config import Activation
from lockstep.offload import HostActivations
from lockstep.parallel import apply_activation_checkpointing
from tests.offload.weights.device.late import LateCopies
from tests.patching import module_of

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return y if mask is None else y * mask


class Net(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.inputs: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(WIDTH)
        for layer in self.layers:
            self.inputs.append(StorageWeakRef(x.untyped_storage()))
            x = layer(x, mask=mask)
        return x


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)) * torch.ones(
        1, requires_grad=True
    )


def pair(monkeypatch: pytest.MonkeyPatch, count: int = 4) -> tuple[Net, Net, LateCopies]:
    """A net whose blocks' inputs are moved, its plain copy, and the copies."""
    torch.manual_seed(0)
    model, copies = Net(count), LateCopies()
    plain = copy.deepcopy(model)
    monkeypatch.setattr(
        module_of(apply_activation_checkpointing),
        "HostActivations",
        lambda: HostActivations(lambda device: copies),
    )
    return (
        apply_activation_checkpointing(
            model, Activation.OFFLOAD, {f"{i}": b for i, b in enumerate(model.layers)}
        ),
        plain,
        copies,
    )


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)


def test_each_input_is_copied_while_its_block_computes_and_comes_back_while_the_block_after_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, plain, copies = pair(monkeypatch, 3)
    loss = model(rows()).sum()
    out = lambda number: [  # noqa: E731
        ("computed", str(number)), ("after", str(number)), ("copy", number), ("compute after", number),
    ]  # fmt: skip
    assert copies.log == out(1) + out(2) + out(3)
    copies.log.clear()
    loss.backward()
    back = lambda number: [("computed", str(number)), ("after", str(number)), ("copy", number)]  # noqa: E731
    assert copies.log == [
        *back(4), *back(5), ("compute after", 4),  # the third block's; the second's starts
        *back(6), ("compute after", 5),  # the first's starts
        ("compute after", 6),
    ]  # fmt: skip
    plain(rows()).sum().backward()
    assert_same_gradients(model, plain)


def test_between_forward_and_backward_no_input_is_on_the_device_and_in_backward_at_most_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, copies = pair(monkeypatch)
    gc.collect()
    loss = model(rows()).sum()
    assert len(model.inputs) == 4 and all(reference.expired() for reference in model.inputs)
    alive = []
    for layer in model.layers:
        layer.linear.weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(not reference.expired() for reference in copies.made))
        )
    loss.backward()
    assert len(alive) == 4 and max(alive) <= 2
    assert all(reference.expired() for reference in copies.made)


def test_host_buffers_are_used_again_by_the_next_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, copies = pair(monkeypatch)
    for seed in range(3):
        model(rows(seed)).sum().backward()
        plain(rows(seed)).sum().backward()
    assert copies.host_buffers == 4
    assert_same_gradients(model, plain)
    assert not any(entry[0] == "host waits" for entry in copies.log)


def test_a_graph_serves_two_backwards_and_two_graphs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, _ = pair(monkeypatch)
    for net in (model, plain):
        loss = net(rows()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        first, second = net(rows(1)).sum(), net(rows(2)).sum()
        first.backward()  # not in the order of the forwards
        second.backward()
        (net(rows(3)).sum() * net(rows(4)).sum()).backward()
    assert_same_gradients(model, plain)


def test_graphs_that_are_dropped_leave_no_copy_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, copies = pair(monkeypatch)
    model(rows())  # no backward
    output = model(rows(1))
    model.layers[1].linear.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()  # stops when the first block's input is on its way
    del output
    gc.collect()
    model.layers[1].linear.weight._backward_hooks.clear()
    model.zero_grad()
    for net in (model, plain):
        net(rows(2)).sum().backward()
    assert_same_gradients(model, plain)
    assert copies.done == len(copies.queue)
    assert copies.host_buffers <= 5  # of a backward that failed torch keeps one input until the next


def test_layout_is_kept_and_what_needs_no_gradient_or_is_no_plain_tensor_stays() -> None:
    copies = LateCopies()
    around = HostActivations(lambda device: copies if device.type == "cpu" else None)
    seen: list[Any] = []
    x = torch.randn(4, 6, requires_grad=True)
    inputs = (
        (x * 1).t(),
        (x * 2)[::2],
        torch.ones(2),
        nn.Parameter(torch.ones(3)),
        torch.ones((), requires_grad=True),
    )

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        seen.append([(t.clone().detach(), t.stride()) for t in tensors])
        return sum((t * t).sum() for t in tensors)

    with around:
        result = checkpoint(function, *inputs, use_reentrant=False)
    assert len(copies.queue) == 4
    result.backward()
    for index, ((first, stride), (again, stride_again)) in enumerate(zip(*seen, strict=True)):
        assert torch.equal(first, again)
        assert stride == stride_again or index == 1  # gaps are not copied
    meta = torch.ones(2, device="meta", requires_grad=True)
    sparse = torch.eye(2).to_sparse().requires_grad_()
    for tensor in (meta, sparse, torch.ones(2)):
        assert around.pack_hook(tensor) is tensor and around.unpack_hook(tensor) is tensor
