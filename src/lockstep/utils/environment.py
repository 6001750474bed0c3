"""Names that scripts import from ``accelerate.utils.environment``."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config.sources import inherited_environment, process_environment, restore_environment
from lockstep.runtime.process import run_beside_gpu
from lockstep.utils import clear_environment, patch_environment, str_to_bool

__all__ = [
    "CPUInformation",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_driver_version",
    "get_gpu_info",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of several environment variables that is a number of at least 0.

    Args:
        env_keys: Names of variables, such as ``["RANK", "PMI_RANK"]``.
        default: What is returned if none of them is set.

    Examples:
        ```python
        from lockstep.utils import get_int_from_env, patch_environment

        with patch_environment(pmi_rank=3):
            assert get_int_from_env(["A_RANK", "PMI_RANK"], default=0) == 3
        ```
    """
    environ = inherited_environment()
    values = (int(environ.get(key) or -1) for key in env_keys)
    return next((value for value in values if value >= 0), default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether an environment variable is a word such as ``yes``, ``true`` or ``1``.

    Args:
        key: The name of the variable.
        default: What is returned if it is not set.

    Raises:
        ValueError: it is neither such a word nor one such as ``no``.

    Examples:
        ```python
        from lockstep.utils import parse_flag_from_env, patch_environment

        with patch_environment(my_flag="yes"):
            assert parse_flag_from_env("MY_FLAG")
        assert not parse_flag_from_env("MY_FLAG")
        ```
    """
    return bool(str_to_bool(inherited_environment().get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the value of an environment variable.

    Args:
        key: The name of the variable.
        default: What is returned if it is not set.

    Examples:
        ```python
        from lockstep.utils import parse_choice_from_env, patch_environment

        with patch_environment(my_choice="fast"):
            assert parse_choice_from_env("MY_CHOICE") == "fast"
        assert parse_choice_from_env("MY_CHOICE") == "no"
        ```
    """
    return inherited_environment().get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those names of ``library_names`` that this process has imported.

    Examples:
        ```python
        import torch
        from lockstep.utils import are_libraries_initialized

        assert are_libraries_initialized("torch", "a_package_that_nobody_has") == ["torch"]
        ```
    """
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return environment variables as lines ``NAME=value``.

    Args:
        current_env: Name -> value. A warning names variables that are left out, because they are empty or have one of
            the characters ``;``, ``<``, ``>``, a space or the end of a line.

    Examples:
        ```python
        from lockstep.utils import convert_dict_to_env_variables

        lines = convert_dict_to_env_variables({"NCCL_DEBUG": "INFO"})
        assert [line.strip() for line in lines] == ["NCCL_DEBUG=INFO"]
        ```
    """
    lines = []
    for name, value in current_env.items():
        if value and not set(";\n<> ").intersection(name + value):
            lines.append(f"{name}={value}\n")
        else:
            warnings.warn(
                f"{name} is left out, because it has no value or has a forbidden character.", stacklevel=2
            )
    return lines


@contextmanager
def _restored() -> Iterator[None]:
    """Variables of Accelerate that come or change inside are afterwards as they were."""
    before = {
        name: value for name, value in inherited_environment().items() if name.startswith("ACCELERATE_")
    }
    try:
        yield
    finally:
        others = {
            name: v for name, v in inherited_environment().items() if not name.startswith("ACCELERATE_")
        }
        restore_environment(others | before)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a test so that changes of variables ``ACCELERATE_*`` end with it.

    Args:
        func_or_cls: A test function, or a class of tests. With a class, tests of derived classes are decorated as
            well.

    Examples:
        ```python
        import os
        from lockstep.utils import purge_accelerate_environment

        @purge_accelerate_environment
        def test() -> None:
            os.environ["ACCELERATE_USE_CPU"] = "true"

        test()
        assert "ACCELERATE_USE_CPU" not in os.environ
        ```
    """
    if not isinstance(func_or_cls, type):
        return _purged(func_or_cls)
    cls: Any = func_or_cls
    _purge_tests(cls)
    cls.__init_subclass__ = classmethod(lambda derived, **kwargs: _purge_tests(derived))
    return cls


def _purge_tests(cls: type) -> None:
    """Inherited tests too; those that are wrapped already, as of a decorated base, stay."""
    for name in dir(cls):
        test = getattr(cls, name)
        if name.startswith("test") and callable(test) and not hasattr(test, "is_purged"):
            setattr(cls, name, _purged(test))


def _purged(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def purged(*args: object, **kwargs: object) -> object:
        with _restored():
            return function(*args, **kwargs)

    vars(purged)["is_purged"] = True
    return purged


@dataclass
class CPUInformation:
    """The place of a process among all processes of a run.

    Args:
        rank: The number of the process, from 0.
        world_size: The number of processes.
        local_rank: Its number among the processes of this machine, from 0.
        local_world_size: The number of processes on this machine.

    Examples:
        ```python
        from lockstep.utils import CPUInformation, get_cpu_distributed_information

        assert isinstance(get_cpu_distributed_information(), CPUInformation)
        ```
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the place of this process, as the environment variables of its launcher tell.

    Examples:
        ```python
        from lockstep.utils import get_cpu_distributed_information

        here = get_cpu_distributed_information()
        assert 0 <= here.rank < here.world_size
        ```
    """
    here = process_environment(need_rendezvous=False)
    return CPUInformation(here.rank, here.world_size, here.local_rank, here.local_world_size)


# -- devices ---------------------------------------------------------------------------------------------


def get_current_device_type() -> tuple[str, str]:
    """Return the type of this machine's accelerator and the distributed type, such as ``("cuda", "MULTI_GPU")``.

    Without an accelerator it returns these as well, as Accelerate does.

    Examples:
        ```python
        from lockstep.utils import get_current_device_type

        kind, distributed_type = get_current_device_type()
        print(kind, distributed_type)  # cuda MULTI_GPU
        ```
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cuda" if accelerator is None or accelerator.type == "mps" else accelerator.type
    return kind, "MULTI_GPU" if kind == "cuda" else f"MULTI_{kind.upper()}"


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the GPUs that CUDA shows, and their number.

    Examples:
        ```python
        from lockstep.utils import get_gpu_info

        names, count = get_gpu_info()
        assert len(names) == count
        ```
    """
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_name(index) for index in range(count)], count


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver, as ``nvidia-smi`` prints it.

    Raises:
        FileNotFoundError: there is no ``nvidia-smi``.
        subprocess.CalledProcessError: ``nvidia-smi`` failed.

    Examples:
        ```python
        from lockstep.utils import get_driver_version

        print(get_driver_version())  # such as 550.54.15
        ```
    """
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the GPUs of this machine can send each other data directly.

    They cannot if there are several of NVIDIA's RTX 40 series, and the driver is older than 550.40.

    Examples:
        ```python
        from lockstep.utils import check_cuda_p2p_ib_support

        print("direct" if check_cuda_p2p_ib_support() else "set NCCL_P2P_DISABLE=1")
        ```
    """
    names, count = get_gpu_info()
    if count < 2 or not any(f"RTX 40{number}0" in name for name in names for number in range(6, 10)):
        return True
    from packaging.version import Version  # here, because few machines come so far

    return Version(get_driver_version()) >= Version("550.40")


def check_cuda_fp8_capability() -> bool:
    """Return whether the GPU computes in 8-bit floating point: compute capability 8.9 or above.

    Examples:
        ```python
        from lockstep.utils import check_cuda_fp8_capability

        print("fp8" if check_cuda_fp8_capability() else "bf16")
        ```
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Let this process run only on the cores that are close to its GPU.

    Nothing happens without CUDA, or if Linux does not tell which cores these are.

    Args:
        local_process_index: The local rank, which is the index of the GPU.
        verbose: Warn with the chosen cores. None: as the variable ``ACCELERATE_DEBUG_MODE`` tells.

    Examples:
        ```python
        from lockstep import PartialState
        from lockstep.utils import override_numa_affinity

        override_numa_affinity(PartialState().local_process_index)  # without CUDA, nothing happens
        ```
    """
    if not torch.cuda.is_available():
        return
    cores = run_beside_gpu(local_process_index)
    if not cores:
        return
    if verbose or (verbose is None and parse_flag_from_env("ACCELERATE_DEBUG_MODE")):
        warnings.warn(f"Process {local_process_index} runs on the cores {cores}.", stacklevel=2)


@functools.lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Call ``override_numa_affinity``, but only once for the same arguments.

    Args:
        local_process_index: The local rank, which is the index of the GPU.
        verbose: Warn with the chosen cores. None: as the variable ``ACCELERATE_DEBUG_MODE`` tells.

    Examples:
        ```python
        from lockstep import PartialState
        from lockstep.utils import set_numa_affinity

        set_numa_affinity(PartialState().local_process_index)  # without CUDA, nothing happens
        ```
    """
    override_numa_affinity(local_process_index, verbose)
