"""Names that scripts import from ``accelerate.utils.environment``."""

from __future__ import annotations

import subprocess

import torch

from lockstep.utils import clear_environment, patch_environment, str_to_bool

__all__ = [
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "clear_environment",
    "patch_environment",
    "str_to_bool",
]


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the GPUs of this machine can send each other data directly.

    They cannot if there are several of NVIDIA's RTX 40 series, and the driver is older than 550.40.

    Examples:
        ```python
        from lockstep.utils import check_cuda_p2p_ib_support

        print("direct" if check_cuda_p2p_ib_support() else "set NCCL_P2P_DISABLE=1")
        ```
    """
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if len(names) < 2 or not any(f"RTX 40{number}0" in name for name in names for number in range(6, 10)):
        return True
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return tuple(map(int, driver.split("\n")[0].split(".")[:2])) >= (550, 40)


def check_cuda_fp8_capability() -> bool:
    """Return whether the GPU computes in 8-bit floating point: compute capability 8.9 or above.

    Examples:
        ```python
        from lockstep.utils import check_cuda_fp8_capability

        print("fp8" if check_cuda_fp8_capability() else "bf16")
        ```
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
