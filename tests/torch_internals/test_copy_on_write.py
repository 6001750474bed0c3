"""Clones that share memory until a tensor is written to, by whatever way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.torch_internals import is_shared, lazy_clone, take_back
from tests.patching import module_of

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda tensor: tensor.data.fill_(7),
    "view": lambda tensor: tensor[1:].add_(7),
    "numpy": lambda tensor: tensor.numpy().fill(7),
    "dlpack": lambda tensor: torch.from_dlpack(tensor.__dlpack__()).fill_(7),
    "out": lambda tensor: torch.ones(tensor.shape, out=tensor),
    "foreach": lambda tensor: torch._foreach_add_([tensor], 7),
    "index": lambda tensor: tensor.__setitem__(0, 7),
    "parameter": lambda tensor: nn.init.constant_(nn.Parameter(tensor), 7),
}


def test_the_installed_torch_can() -> None:
    assert module_of(lazy_clone)._is_available()


@pytest.mark.parametrize("way", WRITES)
def test_a_clone_keeps_its_values_however_the_tensor_is_written_to(way: str) -> None:
    tensor = torch.arange(5.0)
    clone = lazy_clone(tensor)
    assert clone is not None
    assert is_shared(tensor)
    WRITES[way](tensor)
    assert not is_shared(tensor)
    assert tensor.tolist() != [0, 1, 2, 3, 4]
    assert clone.tolist() == [0, 1, 2, 3, 4]


def test_a_tensor_keeps_its_memory_once_its_clone_is_gone() -> None:
    tensor = torch.arange(5.0)
    address = tensor.data_ptr()
    clone = lazy_clone(tensor)
    assert clone is not None
    del clone
    take_back(tensor)
    assert not is_shared(tensor)
    assert tensor.data_ptr() == address
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_memory_that_torch_has_not_allocated_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(400))
    mapped = torch.from_file(str(tmp_path / "file"), shared=True, size=100)
    for tensor in (mapped, torch.from_numpy(np.zeros(5)), torch.zeros(5).share_memory_()):
        assert lazy_clone(tensor) is None
    assert lazy_clone(torch.zeros(5, device="meta")) is None
