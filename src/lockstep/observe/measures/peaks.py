"""How many floating-point operations a device could do in a second, at best: what utilisation is measured against.

For accelerators as their makers say, for dense matrices, without sparsity. For a CPU it is measured, once in a process:
the quickest of some products of matrices, with the threads that this process computes with.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

TERA = 1e12


class PeakRow(NamedTuple):
    """TFLOP/s of one kind of device, by type of its numbers. ``tf32``: float32 in tensor cores."""

    pattern: str
    peaks: Mapping[str, float]
    source: str


TABLE = (
    PeakRow(
        r"\bB200\b",
        {"fp8": 4500, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
        "NVIDIA HGX B200 datasheet",
    ),
    PeakRow(
        r"\bH100\b.*PCIe",
        {"fp8": 1513, "bf16": 756.5, "fp16": 756.5, "tf32": 378, "fp32": 51},
        "NVIDIA H100 datasheet, PCIe",
    ),
    PeakRow(
        r"\bH100 NVL\b",
        {"fp8": 1670.5, "bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60},
        "NVIDIA H100 datasheet, NVL",
    ),
    PeakRow(
        r"\b(H100|H200|GH200)\b",
        {"fp8": 1979, "bf16": 989.5, "fp16": 989.5, "tf32": 494.7, "fp32": 67},
        "NVIDIA H100 and H200 datasheets, SXM",
    ),
    PeakRow(r"\bA100\b", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}, "NVIDIA A100 datasheet"),
    PeakRow(
        r"\bL40S\b",
        {"fp8": 733, "bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
        "NVIDIA L40S datasheet",
    ),
    PeakRow(
        r"\bL4\b", {"fp8": 242.5, "bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}, "NVIDIA L4 datasheet"
    ),
    PeakRow(r"\bA10\b", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}, "NVIDIA A10 datasheet"),
    PeakRow(r"\bA40\b", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}, "NVIDIA A40 datasheet"),
    PeakRow(r"\bV100\b.*PCI", {"fp16": 112, "fp32": 14}, "NVIDIA V100 datasheet, PCIe"),
    PeakRow(r"\bV100\b", {"fp16": 125, "fp32": 15.7}, "NVIDIA V100 datasheet, SXM2"),
    PeakRow(r"\bT4\b", {"fp16": 65, "fp32": 8.1}, "NVIDIA T4 datasheet"),
    PeakRow(
        r"\bMI300X\b", {"fp8": 2614.9, "bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4}, "AMD MI300X datasheet"
    ),
    PeakRow(
        r"\bMI250X\b",
        {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9},
        "AMD MI250X datasheet, half: one of two devices",
    ),
)
"""Of several rows that fit, the first holds."""


def peak_of(device: torch.device, precision: str) -> float | None:
    """Operations a second of one device for "fp8", "bf16", "fp16" or "fp32"; None: not known.

    Of a CPU it is measured when it is first asked for, which takes about 30 ms.
    """
    if device.type == "cpu":
        return cpu_peak(precision, torch.get_num_threads())
    if device.type != "cuda":
        return None
    return peak_of_name(torch.cuda.get_device_name(device), precision, torch.backends.cuda.matmul.allow_tf32)


def peak_of_name(name: str, precision: str, allows_tf32: bool = False) -> float | None:
    """Return the same for a GPU of this name, such as "NVIDIA H100 80GB HBM3"."""
    row = next((row for row in TABLE if re.search(row.pattern, name)), None)
    if row is None:
        return None
    if precision == "fp32" and allows_tf32 and "tf32" in row.peaks:
        precision = "tf32"
    peak = row.peaks.get(precision)
    return None if peak is None else peak * TERA


CPU_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZE = 512
MEASURE_S = 0.03


@cache
def cpu_peak(precision: str, threads: int) -> float | None:
    """Return the quickest product of two square matrices within 30 ms, after one that is not counted.

    ``threads``: those of torch. It is measured once for each number of them.
    """
    dtype = CPU_DTYPES.get(precision)
    if dtype is None:
        return None
    with torch.no_grad():
        left, right = torch.ones(SIZE, SIZE, dtype=dtype), torch.ones(SIZE, SIZE, dtype=dtype)
        out = left @ right
        quickest, deadline = float("inf"), time.perf_counter() + MEASURE_S
        while (began := time.perf_counter()) < deadline:
            torch.mm(left, right, out=out)
            quickest = min(quickest, time.perf_counter() - began)
    return 2 * SIZE**3 / quickest


def precision_of(mixed_precision: str, parameters: torch.dtype | None) -> str:
    """Return what a run multiplies in: what autocast says, else the type of its parameters."""
    if mixed_precision in ("fp8", "bf16", "fp16"):
        return mixed_precision
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(parameters or torch.float32, "fp32")
