"""The device that ACCELERATE_TORCH_DEVICE names."""

from __future__ import annotations

import torch

from lockstep.config import named_device
from lockstep.errors import ConfigError
from lockstep.runtime import device_named
from tests.refusals import expect_refusal


def test_only_the_cpu_may_be_named() -> None:
    assert device_named("cpu:1") == torch.device("cpu")
    expect_refusal(ConfigError, "choose GPUs by CUDA_VISIBLE_DEVICES", device_named, "cuda:1")


def test_an_empty_variable_says_nothing() -> None:
    assert named_device({"ACCELERATE_TORCH_DEVICE": ""}) is None
    assert named_device({"ACCELERATE_TORCH_DEVICE": "cpu"}) == "cpu"
