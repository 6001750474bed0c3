"""Names that scripts import from ``accelerate.utils.imports``."""

from __future__ import annotations

from lockstep.runtime.available import *  # noqa: F403  (is_<package>_available)
from lockstep.runtime.available import (
    is_available,
    is_transformer_engine_available,
)


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


def is_pippy_available() -> bool:
    """Return True: torch has pipelines, in ``torch.distributed.pipelining``.

    Examples:
        ```python
        from lockstep.utils import is_pippy_available

        assert is_pippy_available()
        ```
    """
    return True


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
