"""Names that scripts import from ``accelerate.utils.imports``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from lockstep.runtime.available import *  # noqa: F403  (is_<package>_available)
from lockstep.runtime.available import (
    is_available,
    is_bnb_available,
    is_deepspeed_available,
    is_torchao_available,
    is_transformer_engine_available,
)

T = TypeVar("T")


def is_amdsmi_available() -> bool:
    """Return whether the package amdsmi is installed, which reads the state of GPUs of AMD.

    Examples:
        ```python
        from lockstep.utils import is_amdsmi_available

        print("with amdsmi" if is_amdsmi_available() else "without amdsmi")
        ```
    """
    return is_available("amdsmi")


def is_import_timer_available() -> bool:
    """Return whether the package import_timer is installed.

    Examples:
        ```python
        from lockstep.utils import is_import_timer_available

        print("with import_timer" if is_import_timer_available() else "without import_timer")
        ```
    """
    return is_available("import_timer")


def is_neuron_available(check_device: bool = False) -> bool:
    """Return False: Lockstep does not drive Neuron devices. ``check_device`` is ignored.

    Examples:
        ```python
        from lockstep.utils import is_neuron_available

        assert not is_neuron_available()
        ```
    """
    return False


def is_habana_gaudi1() -> bool:
    """Return False: Lockstep does not drive the first generation of Gaudi.

    Examples:
        ```python
        from lockstep.utils import is_habana_gaudi1

        assert not is_habana_gaudi1()
        ```
    """
    return False


def is_xccl_available() -> bool:
    """Return whether torch was built with XCCL, the backend of Intel's GPUs.

    Examples:
        ```python
        from lockstep.utils import is_xccl_available

        print("with xccl" if is_xccl_available() else "without xccl")
        ```
    """
    import torch

    return torch.distributed.distributed_c10d.is_xccl_available()


def is_pippy_available() -> bool:
    """Return True: torch has pipelines, in ``torch.distributed.pipelining``.

    Examples:
        ```python
        from lockstep.utils import is_pippy_available

        assert is_pippy_available()
        ```
    """
    return True


def is_weights_only_available() -> bool:
    """Return True: torch can read checkpoints without running code from them.

    Examples:
        ```python
        from lockstep.utils import is_weights_only_available

        assert is_weights_only_available()
        ```
    """
    return True


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether the installed bitsandbytes computes on other devices than CUDA's.

    Examples:
        ```python
        from lockstep.utils import is_bitsandbytes_multi_backend_available

        print("any device" if is_bitsandbytes_multi_backend_available() else "CUDA only")
        ```
    """
    if not is_bnb_available():
        return False
    import bitsandbytes

    return "multi_backend" in getattr(bitsandbytes, "features", set())


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether TransformerEngine is installed, and the GPU computes in its block format MXFP8.

    Examples:
        ```python
        from lockstep.utils import is_transformer_engine_mxfp8_available

        print("with MXFP8" if is_transformer_engine_mxfp8_available() else "without MXFP8")
        ```
    """
    if not is_transformer_engine_available():
        return False
    import transformer_engine.pytorch.fp8 as engine

    return bool(engine.check_mxfp8_support()[0])


def deepspeed_required(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function that needs the package deepspeed.

    Args:
        func: The function. Without the package, calls of the decorated function raise ImportError.

    Examples:
        ```python
        from lockstep.utils import deepspeed_required, is_deepspeed_available

        @deepspeed_required
        def version() -> str:
            import deepspeed

            return deepspeed.__version__

        print(version() if is_deepspeed_available() else "without deepspeed, version() raises ImportError")
        ```
    """
    return _required(func, is_deepspeed_available, "deepspeed")


def torchao_required(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function that needs the package torchao.

    Args:
        func: The function. Without the package, calls of the decorated function raise ImportError.

    Examples:
        ```python
        from lockstep.utils import is_torchao_available, torchao_required

        @torchao_required
        def version() -> str:
            import torchao

            return torchao.__version__

        print(version() if is_torchao_available() else "without torchao, version() raises ImportError")
        ```
    """
    return _required(func, is_torchao_available, "torchao")


def transformer_engine_required(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function that needs the package transformer_engine.

    Args:
        func: The function. Without the package, calls of the decorated function raise ImportError.
    """
    return _required(func, is_transformer_engine_available, "transformer_engine")


def _required(func: Callable[..., T], check: Callable[[], bool], package: str) -> Callable[..., T]:
    @functools.wraps(func)
    def checked(*args: object, **kwargs: object) -> T:
        if not check():
            raise ImportError(
                f"{func.__name__} needs the package '{package}'. Install it with: pip install {package}"
            )
        return func(*args, **kwargs)

    return checked
