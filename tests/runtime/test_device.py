"""The device that ACCELERATE_TORCH_DEVICE names."""

from __future__ import annotations

import pytest
import torch

from lockstep.config import named_device, process_environment
from lockstep.errors import ConfigError
from lockstep.runtime import device_named, device_number
from tests.refusals import expect_refusal


def test_only_the_cpu_may_be_named() -> None:
    assert device_named("cpu:1") == torch.device("cpu")
    expect_refusal(ConfigError, "choose GPUs by CUDA_VISIBLE_DEVICES", device_named, "cuda:1")


@pytest.mark.parametrize(
    ("launcher", "devices", "expected"),
    [("srun", 1, 0), ("srun", 2, 1), ("torchrun", 1, 1), ("torchrun", 2, 1)],
)
def test_a_task_that_is_shown_one_device_takes_it(
    monkeypatch: pytest.MonkeyPatch, launcher: str, devices: int, expected: int
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    names = {
        "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    }[launcher]
    meeting = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    environment = process_environment(dict(zip(names, ("1", "2", "1", "2"), strict=True)) | meeting)
    assert device_number(environment) == expected


def test_an_empty_variable_says_nothing() -> None:
    assert named_device({"ACCELERATE_TORCH_DEVICE": ""}) is None
    assert named_device({"ACCELERATE_TORCH_DEVICE": "cpu"}) == "cpu"
