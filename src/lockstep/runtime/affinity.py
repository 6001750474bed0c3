"""Running a process on the cores beside its GPU."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from lockstep.runtime.process import Runtime


def run_beside_gpu(index: int) -> str:
    """Let this process run only on the cores of the GPU's NUMA node; their numbers, or "" where Linux does not say."""
    gpu: Any = torch.cuda.get_device_properties(index)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        cores = Path(f"/sys/devices/system/node/node{max(0, node)}/cpulist").read_text().strip()
    except (OSError, ValueError):
        return ""
    chosen: set[int] = set()
    for part in cores.split(","):
        first, _, last = part.partition("-")
        chosen.update(range(int(first), int(last or first) + 1))
    os.sched_setaffinity(0, chosen)
    return cores


def apply_affinity(runtime: Runtime) -> None:
    """``run_beside_gpu``, if the process has one; else the main process says that nothing was done."""
    done = runtime.device.type == "cuda" and bool(run_beside_gpu(runtime.device.index or 0))
    if not done and runtime.is_main:
        warnings.warn(
            f"enable_cpu_affinity has no effect: this process computes on {runtime.device}, and the system names no "
            "cores beside it.",
            stacklevel=3,
        )
