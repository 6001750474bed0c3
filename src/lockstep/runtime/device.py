"""Which device a process computes on, and which backend its collectives use."""

from __future__ import annotations

import torch

from lockstep.errors import UsageError


def choose_device(local_rank: int, cpu: bool) -> torch.device:
    """The device of the process with this rank on its machine: ``cuda:<local_rank>``, else xpu, mps, cpu.

    Raises:
        UsageError: there are accelerators, but fewer than ranks on this machine.
    """
    if cpu:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps":
        return torch.device("mps") if local_rank == 0 else torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UsageError(
            f"Local rank {local_rank} has no device: this machine shows {count} {accelerator.type} device(s). "
            f"Start at most {count} processes here, or pass cpu=True."
        )
    return torch.device(accelerator.type, local_rank)


def choose_backend(device: torch.device) -> str:
    """The backend of the default group. CPU tensors always have one, for objects and small checks."""
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    if device.type == "xpu":
        return "cpu:gloo,xpu:xccl"
    return "gloo"
