"""The device that ACCELERATE_TORCH_DEVICE names."""

from __future__ import annotations

import pytest
import torch

from lockstep.config import named_device, process_environment
from lockstep.errors import ConfigError
from lockstep.runtime import device_named, device_number
from tests.refusals import expect_refusal


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("name", "local_rank", "processes", "expected"),
    [
        ("cpu", 0, 1, "cpu"),
        ("cpu:1", 1, 2, "cpu"),
        ("cuda:1", 0, 1, "cuda:1"),
        ("cuda", 1, 2, "cuda:1"),
    ],
)
def test_it_is_taken(two_gpus: None, name: str, local_rank: int, processes: int, expected: str) -> None:
    assert device_named(name, local_rank, processes) == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "processes", "message"),
    [
        ("cuda:2", 1, "shows 2 cuda device(s)"),
        ("xpu", 1, "shows 0 xpu device(s)"),
        ("cuda:0", 2, "Write cuda"),
        ("gpu", 1, "ACCELERATE_TORCH_DEVICE=gpu"),
    ],
)
def test_what_is_not_here_is_refused(two_gpus: None, name: str, processes: int, message: str) -> None:
    expect_refusal(ConfigError, message, device_named, name, 0, processes)


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
