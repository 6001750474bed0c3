"""What autograd keeps of streamed weights: no memory; and of all else what it would keep without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lockstep.offload.weights import DeviceMover, find_weight_groups


class Products(nn.Module):
    """Its weights are saved as they are, transposed, as parts, as other views, conjugated, and as made by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.double))
        self.other = nn.Parameter(torch.randn(4, 6, dtype=torch.double))
        self.complex = nn.Parameter(torch.randn(4, 4, dtype=torch.cdouble))
        self.norm = nn.LayerNorm(4, dtype=torch.double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight[:, 2:])  # x: 3, 4
        y = y * self.weight[1:2, ::2].sum() @ self.other.t()[1:5] + self.other[:, 0] ** 2
        y = (y.to(torch.cdouble) @ self.complex.conj() @ self.complex.mH).real
        z = torch.exp(self.norm(y))
        return z * z.clone().detach() + self.weight.view(-1)[3:7] * self.weight.unfold(1, 2, 2)[0, 0].sum()


@contextmanager
def forward_of(model: nn.Module) -> Iterator[tuple[DeviceMover, Any]]:
    """Within a group's forward; the weights are let go at its end."""
    (group,) = find_weight_groups(model, {"": model})
    mover = DeviceMover([group], torch.device("cpu"))
    mover.forward_begins(group)
    mover.load(group)
    mover.bind(group)
    yield mover, group
    mover.forward_ended(group)
    assert mover.release(group) and mover.slots.allocated_bytes == mover.nbytes(group)
    mover.slots.take(mover.nbytes(group)).buffer.fill_(0xFF)  # whoever still reads it reads NaN


def inputs() -> torch.Tensor:
    return torch.randn(
        3, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1), requires_grad=True
    )


def test_weights_that_are_saved_as_any_view_come_back_in_other_memory() -> None:
    model, plain, x, y = Products(), Products(), inputs(), inputs()
    with forward_of(model) as (mover, group):
        result = model(x)
    result.square().sum().backward()
    plain(y).square().sum().backward()
    mover.flush()
    assert torch.equal(x.grad, y.grad)
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name
    assert mover.release(group)


def test_other_tensors_go_to_the_hooks_around_and_the_same_ones_as_without() -> None:
    def shapes_of(streamed: bool) -> list[torch.Size]:
        seen: list[torch.Size] = []
        model, x = Products(), inputs()
        storages = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in storages:
                seen.append(tensor.shape)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            if streamed:
                with forward_of(model):
                    model(x)
            else:
                model(x)
        return seen

    assert shapes_of(True) == shapes_of(False) != []


@pytest.mark.parametrize("way", ["cast", "copied", "in place", "kept layout"])
def test_casts_of_weights_are_made_again_only_where_they_are_casts_and_nothing_else(way: str) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4, 4, 2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight.to(torch.bfloat16)
            if way == "copied":
                weight = self.weight.to(torch.bfloat16) * 2
            elif way == "in place":
                weight.mul_(2)
            elif way == "kept layout":
                weight = self.weight.to(torch.bfloat16, memory_format=torch.channels_last)
            return F.conv2d(x, weight) @ weight[0, 0].t()

    results = []
    for streamed in (True, False):
        model, x = Casting(), torch.ones(1, 4, 3, 3, dtype=torch.bfloat16, requires_grad=True)
        if streamed:
            with forward_of(model) as (mover, _):
                result = model(x)
            result.sum().backward()
            mover.flush()
        else:
            model(x).sum().backward()
        results.append((x.grad, model.weight.grad))
    assert all(torch.equal(ours, plain) for ours, plain in zip(*results, strict=True))
