"""Names that scripts import from ``accelerate.utils.dataclasses``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
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
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
else:
    __getattr__ = lazy_names(
        __name__, dict.fromkeys(("DeepSpeedPlugin", "FullyShardedDataParallelPlugin"), "lockstep.utils")
    )

__all__ = [
    "AutocastKwargs",
    "BaseEnum",
    "BnbQuantizationConfig",
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
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
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
class TensorInformation:
    """The shape and the dtype of a tensor that another rank has.

    Args:
        shape: The shape, such as ``torch.Size([8, 4])``.
        dtype: The dtype, such as ``torch.float32``.

    Examples:
        ```python
        import torch
        from lockstep.utils import TensorInformation, get_data_structure

        known = get_data_structure(torch.zeros(8, 4))
        assert known == TensorInformation(torch.Size([8, 4]), torch.float32)
        ```
    """

    shape: torch.Size
    dtype: torch.dtype


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
class TorchTensorParallelPlugin:
    """Accelerate's former description of tensor parallel. ``Accelerator`` does not take it: pass ``parallel="tp=2"``.

    Args:
        tp_size: The number of ranks over which layers are split.
        torch_device_mesh: A mesh of torch.

    Examples:
        ```python
        from lockstep.utils import TorchTensorParallelPlugin

        assert TorchTensorParallelPlugin(tp_size=2).tp_size == 2  # Accelerator takes parallel="tp=2"
        ```
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None


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


@dataclass
class BnbQuantizationConfig:
    """How ``load_and_quantize_model`` quantises linear layers with the package bitsandbytes.

    Args:
        load_in_8bit: Quantise to 8 bits (LLM.int8). Set either this or ``load_in_4bit``.
        llm_int8_threshold: With 8 bits, columns of the input with a larger value are multiplied in 16 bits.
        load_in_4bit: Quantise to 4 bits (QLoRA).
        bnb_4bit_quant_type: ``"fp4"`` or ``"nf4"``: how 4 bits stand for a number.
        bnb_4bit_use_double_quant: With 4 bits, quantise the scales as well.
        bnb_4bit_compute_dtype: The type of the computation with 4 bits: ``"fp32"``, ``"fp16"``, ``"bf16"`` or a
            ``torch.dtype``.
        torch_dtype: The type of all other floating-point weights. None: float16.
        skip_modules: Names of modules that are not quantised. None: those of ``get_keys_to_not_convert``.
        keep_in_fp32_modules: Parts of names of weights that stay in float32. None: there are none.

    Raises:
        ValueError: both or none of ``load_in_8bit`` and ``load_in_4bit`` are on, or a value is not allowed.

    References: Dettmers et al., LLM.int8(), NeurIPS 2022; Dettmers et al., QLoRA, NeurIPS 2023.

    Examples:
        ```python
        import torch
        from lockstep.utils import BnbQuantizationConfig

        config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16")
        assert config.bnb_4bit_compute_dtype == torch.bfloat16
        ```
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    target_dtype: CustomDtype | torch.dtype | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, but must be True or False. Pass one of them."
                )
        if self.load_in_4bit == self.load_in_8bit:
            raise ConfigError("load_in_8bit and load_in_4bit are both on, or both off. Choose one of them.")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigError(
                f"bnb_4bit_quant_type is {self.bnb_4bit_quant_type!r}, but must be 'fp4' or 'nf4'. Use one of them."
            )
        types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        if isinstance(self.bnb_4bit_compute_dtype, str):
            if self.bnb_4bit_compute_dtype not in types:
                raise ConfigError(
                    f"bnb_4bit_compute_dtype is {self.bnb_4bit_compute_dtype!r}, but must be one of "
                    f"{', '.join(types)}, or a torch.dtype. Pass one of them."
                )
            self.bnb_4bit_compute_dtype = types[self.bnb_4bit_compute_dtype]
        self.skip_modules = [] if self.skip_modules is None else self.skip_modules
        self.keep_in_fp32_modules = [] if self.keep_in_fp32_modules is None else self.keep_in_fp32_modules
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8
        if self.torch_dtype is None:
            self.torch_dtype = torch.float16


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
