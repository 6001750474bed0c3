"""Models without values, and models that are made on a device."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn

from lockstep import init_empty_weights, init_on_device


class Scaled(nn.Parameter):
    """A parameter of a class of its own."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 4, bias=False)
        self.last.weight = self.first.weight
        self.own = Scaled(torch.ones(2, dtype=torch.float16), requires_grad=False)
        self.own.label = "kept"  # type: ignore[attr-defined]
        self.register_buffer("angles", torch.tensor([0.0, 2.0, 4.0]), persistent=False)
        self.register_buffer("nothing", None)


def test_parameters_have_shape_and_dtype_but_no_values() -> None:
    with init_empty_weights():
        model = Net()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert model.angles.tolist() == [0, 2, 4]
    assert (model.first.weight.shape, model.first.weight.requires_grad) == ((3, 4), True)
    assert (type(model.own), model.own.dtype, model.own.requires_grad) == (Scaled, torch.float16, False)
    assert model.own.label == "kept"  # type: ignore[attr-defined]
    assert model.last.weight is model.first.weight
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_buffers_too_where_asked_for() -> None:
    with init_empty_weights(include_buffers=True):
        model = Net()
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


def test_a_huge_model_takes_no_memory_and_no_random_numbers() -> None:
    before, kib = torch.get_rng_state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(20_000, 20_000) for _ in range(40)))
    assert sum(parameter.nbytes for parameter in model.parameters()) > 60 * 10**9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < kib + 50 * 1024
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_inside_ends_it() -> None:
    with pytest.raises(ValueError), init_on_device("meta", include_buffers=True):
        raise ValueError
    assert nn.BatchNorm1d(2).running_mean.device.type == "cpu"


def test_contexts_may_be_nested_and_devices_given() -> None:
    with init_empty_weights():
        with init_on_device(torch.device("cpu")):
            pass
        assert nn.Linear(2, 2).weight.is_meta
    with init_on_device("cpu"):
        assert nn.Linear(2, 2).weight.device.type == "cpu"
