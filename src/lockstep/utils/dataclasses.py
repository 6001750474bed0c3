"""Names that scripts import from ``accelerate.utils.dataclasses``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lockstep.config.enums import StringEnum as BaseEnum
from lockstep.errors import ConfigError
from lockstep.lazy import lazy_names
from lockstep.utils import (
    AutocastKwargs,
    ComputeEnvironment,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)

if TYPE_CHECKING:
    from lockstep.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
else:
    __getattr__ = lazy_names(
        __name__, dict.fromkeys(("DeepSpeedPlugin", "FullyShardedDataParallelPlugin"), "lockstep.utils")
    )

__all__ = [
    "AutocastKwargs",
    "BaseEnum",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "get_module_class_from_name",
]


class CustomDtype(BaseEnum):
    """Types of weights that torch has no dtype for, for computing sizes: ``FP8``, ``INT4`` and ``INT2``.

    Examples:
        ```python
        from lockstep.utils import CustomDtype, dtype_byte_size

        assert dtype_byte_size(CustomDtype.INT4) == 0.5
        ```
    """

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


@dataclass
class TorchTensorParallelConfig:
    """Options of ``ParallelismConfig(tp_size=...)``.

    Args:
        enable_async_tp: True is refused: it is not available.

    Raises:
        ConfigError: ``enable_async_tp`` is True.

    Examples:
        ```python
        from lockstep.parallelism_config import ParallelismConfig
        from lockstep.utils import TorchTensorParallelConfig

        config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig())
        assert config.tp_enabled
        ```
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            raise ConfigError("enable_async_tp=True is not available. Leave it out.")


@dataclass
class TorchContextParallelConfig:
    """Options of ``ParallelismConfig(cp_size=...)``.

    Args:
        cp_comm_strategy: ``"allgather"`` or ``"alltoall"``, as torch names them. None: ``"allgather"``. It changes
            nothing: keys and values always travel around the ring, and the numbers are the same.

    Raises:
        ConfigError: another strategy.

    Examples:
        ```python
        from lockstep.parallelism_config import ParallelismConfig
        from lockstep.utils import TorchContextParallelConfig

        config = ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig("alltoall"))
        assert config.cp_enabled
        ```
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = "allgather"
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ConfigError(
                f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. Use 'allgather' or 'alltoall'."
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of ``ParallelismConfig(sp_size=...)``, which is Ulysses by torch. The sequence may have any length.

    Args:
        sp_seq_length: The length of sequences, if it is fixed.
        sp_seq_length_is_variable: Whether lengths differ. None: True.
        sp_attn_implementation: The name of an attention of transformers. None: ``"sdpa"``.

    Raises:
        ConfigError: ``sp_seq_length_is_variable`` is False, and there is no length.

    Examples:
        ```python
        from lockstep.parallelism_config import ParallelismConfig
        from lockstep.utils import DeepSpeedSequenceParallelConfig

        config = ParallelismConfig(sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig())
        assert config.sp_handler.sp_attn_implementation == "sdpa"
        ```
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigError(
                "sp_seq_length_is_variable=False needs sp_seq_length, which is missing. Pass sp_seq_length."
            )
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = "sdpa"


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class with the name ``name`` among the modules of ``module``. None: none of them has such a class.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_module_class_from_name

        model = torch.nn.Sequential(torch.nn.Linear(4, 1))
        assert get_module_class_from_name(model, "Linear") is torch.nn.Linear
        assert get_module_class_from_name(model, "Conv2d") is None
        ```
    """
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)
