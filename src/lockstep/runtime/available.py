"""Which optional packages and devices this machine has, under the names that scripts import.

Nothing is imported to find out about a package, and torch is imported only when a device is asked for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.version import Version


def is_available(package: str) -> bool:
    """Return whether ``import package`` would find an installed package. It is not imported.

    A bare directory of that name does not count. wandb, for example, leaves such a directory behind.

    Args:
        package: The name that one imports, such as ``"torch"``.

    Examples:
        ```python
        from lockstep.utils import is_available

        assert is_available("torch")
        assert not is_available("a_package_that_nobody_has")
        ```
    """
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def has_version(package: str, minimum: str) -> bool:
    """Return whether a package is installed in a version or a later one. Only the numbers of releases count.

    Args:
        package: The name that one installs, such as ``"scikit-learn"``.
        minimum: The version, such as ``"1.2"``.

    Examples:
        ```python
        from lockstep.utils import has_version

        assert has_version("torch", "2.11")
        assert not has_version("a-package-that-nobody-has", "1.0")
        ```
    """
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return _release(installed) >= _release(minimum)


_COMPARISONS: dict[str, Callable[[Version, Version], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: object, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed package with another version. Only the numbers of releases count.

    Args:
        library_or_version: The name that one installs, or a version as an object of the package ``packaging``.
        operation: ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"``.
        requirement_version: The other version, such as ``"2.11"``.

    Returns:
        Whether the comparison holds.

    Raises:
        ValueError: another ``operation``.
        importlib.metadata.PackageNotFoundError: the package is not installed.

    Examples:
        ```python
        from lockstep.utils import compare_versions

        assert compare_versions("torch", ">=", "2.11")
        assert not compare_versions("torch", "<", "1.0")
        ```
    """
    if operation not in _COMPARISONS:
        raise ValueError(f"operation is {operation!r}, but must be one of {', '.join(_COMPARISONS)}.")
    if isinstance(library_or_version, str):
        library_or_version = importlib.metadata.version(library_or_version)
    return _COMPARISONS[operation](_release(str(library_or_version)), _release(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version compares so, as in ``is_torch_version(">=", "2.11")``.

    Args:
        operation: ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"``.
        version: The version with which torch's is compared.

    Raises:
        ValueError: another ``operation``.

    Examples:
        ```python
        from lockstep.utils import is_torch_version

        assert is_torch_version(">=", "2.11")
        ```
    """
    return compare_versions("torch", operation, version)


def _release(version: str) -> Version:
    """Return a version without what marks a pre-release or a build: a nightly 2.15 has what 2.15 has."""
    # Imported here, because most runs compare no versions.
    from packaging.version import Version

    return Version(Version(version).base_version)


def _any_of(*packages: str) -> Callable[[], bool]:
    """Return a function that says whether one of ``packages`` is installed."""

    def check() -> bool:
        return any(is_available(package) for package in packages)

    which = (
        f"the package {packages[0]}" if len(packages) == 1 else f"one of the packages {', '.join(packages)}"
    )
    check.__doc__ = f"Return whether {which} is installed."
    return check


is_aim_available = _any_of("aim")
is_boto3_available = _any_of("boto3")
is_clearml_available = _any_of("clearml")
is_comet_ml_available = _any_of("comet_ml")
is_datasets_available = _any_of("datasets")
is_deepspeed_available = _any_of("deepspeed")
is_dvclive_available = _any_of("dvclive")
is_lomo_available = _any_of("lomo_optim")
is_matplotlib_available = _any_of("matplotlib")
is_megatron_lm_available = _any_of("megatron.core")
is_mlflow_available = _any_of("mlflow")
is_msamp_available = _any_of("msamp")
is_pandas_available = _any_of("pandas")
is_peft_available = _any_of("peft")
is_pynvml_available = _any_of("pynvml")
is_pytest_available = _any_of("pytest")
is_rich_available = _any_of("rich")
is_sagemaker_available = _any_of("sagemaker")
is_schedulefree_available = _any_of("schedulefree")
is_swanlab_available = _any_of("swanlab")
is_tensorboard_available = _any_of("tensorboard")
is_timm_available = _any_of("timm")
is_torchao_available = _any_of("torchao")
is_torchdata_available = _any_of("torchdata")
is_torchdata_stateful_dataloader_available = _any_of("torchdata.stateful_dataloader")
is_torchvision_available = _any_of("torchvision")
is_tqdm_available = _any_of("tqdm")
is_trackio_available = _any_of("trackio")
is_transformer_engine_available = _any_of("transformer_engine")
is_transformers_available = _any_of("transformers")
is_triton_available = _any_of("triton")
is_wandb_available = _any_of("wandb")
is_fp8_available = _any_of("torchao", "transformer_engine", "msamp")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether NumPy is installed, in the version ``min_version`` or a later one."""
    return is_available("numpy") and has_version("numpy", min_version)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether the package bitsandbytes is installed, in ``min_version`` or later. None: in any version."""
    return is_available("bitsandbytes") and (min_version is None or has_version("bitsandbytes", min_version))


def is_4bit_bnb_available() -> bool:
    """Return whether a bitsandbytes is installed that quantises to 4 bits: 0.39 or later."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return whether a bitsandbytes is installed that quantises to 8 bits: 0.37.2 or later."""
    return is_bnb_available("0.37.2")


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return False: Lockstep does not drive XLA devices. ``check_is_tpu`` and ``check_is_gpu`` are ignored."""
    return False


def _has_device(kind: str, plugin: str | None = None) -> bool:
    """Return whether ``torch.<kind>`` exists and sees a device; ``plugin`` is the package that adds it."""
    if plugin is not None and not is_available(plugin):
        return False
    import torch

    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def is_cuda_available() -> bool:
    """Return whether torch sees a GPU of NVIDIA, or of AMD with ROCm."""
    return _has_device("cuda")


def is_rocm_available() -> bool:
    """Return whether torch was built for ROCm and sees a GPU of AMD."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether torch sees a GPU of Intel. ``check_device`` is ignored: torch always looks for one."""
    return _has_device("xpu")


def is_npu_available(check_device: bool = False) -> bool:
    """Return whether torch sees an NPU of Huawei. ``check_device`` is ignored: torch always looks for one."""
    return _has_device("npu", "torch_npu")


def is_mlu_available(check_device: bool = False) -> bool:
    """Return whether torch sees an MLU of Cambricon. ``check_device`` is ignored: torch always looks for one."""
    return _has_device("mlu", "torch_mlu")


def is_musa_available(check_device: bool = False) -> bool:
    """Return whether torch sees a GPU of Moore Threads. ``check_device`` is ignored: torch always looks for one."""
    return _has_device("musa", "torch_musa")


def is_sdaa_available(check_device: bool = False) -> bool:
    """Return whether torch sees an SDAA device. ``check_device`` is ignored: torch always looks for one."""
    return _has_device("sdaa", "torch_sdaa")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether torch sees a Gaudi device of Intel. ``init_hccl`` is ignored."""
    return _has_device("hpu", "habana_frameworks")


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether torch sees the GPU of a Mac. ``min_version`` is ignored."""
    import torch

    return torch.backends.mps.is_built() and torch.backends.mps.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the device of a run computes in bfloat16. Every CPU does. ``ignore_tpu`` is ignored."""
    import torch

    if is_cuda_available():
        return torch.cuda.is_bf16_supported()
    if is_xpu_available():
        return bool(torch.xpu.is_bf16_supported())
    if is_mps_available():
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    return True


def is_fp16_available() -> bool:
    """Return True: every device computes in float16."""
    return True


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with ``torch.distributed``."""
    import torch

    return torch.distributed.is_available()


_DOCSTRING = """{what}

Examples:
    ```python
    from lockstep.utils import {name}

    print("with {subject}" if {name}() else "without {subject}")
    ```
"""


def _describe(named: dict[str, Any]) -> None:
    """Give each ``is_..._available`` its name, and an example in its docstring."""
    for name, function in named.items():
        described = re.fullmatch(r"is_(\w+)_available", name)
        if described:
            subject = described[1]
            function.__name__ = function.__qualname__ = name
            function.__doc__ = _DOCSTRING.format(what=function.__doc__, name=name, subject=subject)


_describe(globals())
