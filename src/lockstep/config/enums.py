"""The closed lists of words that a configuration may contain."""

from __future__ import annotations

from enum import Enum, EnumMeta


class EnumWithContains(EnumMeta):
    """A metaclass of enums: ``"bf16" in PrecisionType`` is True for values too, as on Python 3.12.

    Examples:
        ```python
        from enum import Enum
        from lockstep.utils import EnumWithContains

        class Colour(Enum, metaclass=EnumWithContains):
            RED = "red"

        assert "red" in Colour and "blue" not in Colour
        ```
    """

    def __contains__(cls, item: object) -> bool:
        members: list[Enum] = list(cls.__members__.values())
        return isinstance(item, cls) or item in [member.value for member in members]


class StringEnum(str, Enum, metaclass=EnumWithContains):
    """An enum of texts: each member is equal to its value, and prints as its value.

    Examples:
        ```python
        from lockstep.utils import BaseEnum

        class Colour(BaseEnum):
            RED = "red"

        assert str(Colour.RED) == "red" and Colour.list() == ["red"]
        ```
    """

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return all values, in order of definition."""
        return [member.value for member in cls]


class DistributedType(StringEnum):
    """How the processes of a run work together, as ``accelerator.distributed_type`` tells.

    ``NO``: one process. ``MULTI_CPU``, ``MULTI_GPU`` and ``MULTI_XPU``: several processes on these devices. ``FSDP``:
    several processes shard models, also if a DeepSpeed plugin asked for it. The other members are Accelerate's, and
    no run has them. A member prints with the name of the class, as ``DistributedType.NO``.

    Examples:
        ```python
        from lockstep import Accelerator, DistributedType

        accelerator = Accelerator(cpu=True)
        alone = accelerator.distributed_type == DistributedType.NO
        assert alone == (accelerator.num_processes == 1)
        ```
    """

    __str__ = Enum.__str__

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    TP = "TP"
    XLA = "XLA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"


class PrecisionType(StringEnum):
    """The values of ``mixed_precision``: ``"no"``, ``"fp16"``, ``"bf16"`` and ``"fp8"``.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.utils import PrecisionType

        accelerator = Accelerator(mixed_precision=PrecisionType.BF16)
        assert accelerator.mixed_precision == "bf16"
        ```
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


class Strategy(StringEnum):
    """Ways of data parallel training that keep the whole model in each process."""

    AUTO = "auto"
    DDP = "ddp"
    DATA_PARALLEL = "dataparallel"


class Activation(StringEnum):
    """What of a block's activations is kept for backward.

    ``NONE``: all. ``FULL``: its inputs; the rest is computed again. ``SELECTIVE``: its inputs and the results
    of matrix products and attention. ``OFFLOAD``: as ``FULL``, with the inputs in host memory.
    """

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"
    OFFLOAD = "offload"


class Compile(StringEnum):
    """What of a model ``torch.compile`` compiles.

    ``NONE``: nothing. ``BLOCKS``: each block by itself. Blocks of the same kind share the code that is made for the
    first one, so that compiling takes as long for 80 blocks as for one.
    """

    NONE = "none"
    BLOCKS = "blocks"


class Offload(StringEnum):
    """What of a training state rests outside of the device, and is brought there when it is needed.

    ``OPTIMIZER``: the optimizer's state. ``PARAMS``: parameters and gradients. ``ALL``: both.
    """

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMS = "params"
    ALL = "all"


class Schedule(StringEnum):
    """The order in which a pipeline's stages work on micro-batches, by the names of its papers.

    ``GPIPE``: Huang et al., NeurIPS 2019. ``1F1B``: Narayanan et al., SOSP 2019. ``INTERLEAVED``: Narayanan et
    al., SC 2021. ``ZERO_BUBBLE`` (interleaved) and ``ZBV``: Qi et al., ICLR 2024. ``DUALPIPEV``: DeepSeek-AI, 2024.
    """

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"


class CPMethod(StringEnum):
    """How attention sees the whole sequence when each rank holds a part of it.

    ``RING``: keys and values travel around. ``ULYSSES``: each rank gets all of the sequence for some heads.
    """

    RING = "ring"
    ULYSSES = "ulysses"


class ReduceType(StringEnum):
    """Types in which gradients may be averaged."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class QuantizedType(StringEnum):
    """Integers that stand for blocks of numbers in a collective."""

    INT8 = "int8"
    INT4 = "int4"


class LoggerType(StringEnum):
    """The trackers that ``log_with`` may name. ``"all"`` means every one that can run here.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.utils import LoggerType

        accelerator = Accelerator(log_with=LoggerType.JSONL, project_dir="logged")
        assert "tensorboard" in LoggerType.list()
        ```
    """

    ALL = "all"
    TENSORBOARD = "tensorboard"
    JSONL = "jsonl"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    AIM = "aim"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class RNGType(StringEnum):
    """The random number generators that ``rng_types`` may name.

    ``TORCH``, ``CUDA`` and ``GENERATOR`` (the loader's own) are made equal on all ranks. The others are Accelerate's,
    and are refused.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.utils import RNGType

        accelerator = Accelerator(rng_types=[RNGType.TORCH])  # equal on all ranks at each epoch's start
        ```
    """

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class CPUBackend(StringEnum):
    """How processes exchange tensors on CPUs: by memory that those of one host share, or by gloo."""

    SHM = "shm"
    GLOO = "gloo"


class DynamoBackend(StringEnum):
    """The backends of ``torch.compile``, by the names that Accelerate's scripts know. In lower case they are torch's
    names.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.utils import DynamoBackend

        accelerator = Accelerator(dynamo_backend=DynamoBackend.NO)  # models are not compiled
        ```
    """

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class ComputeEnvironment(StringEnum):
    """Where a run computes, in the words of Accelerate's files: ``LOCAL_MACHINE`` or ``AMAZON_SAGEMAKER``.

    Examples:
        ```python
        from lockstep.utils import ComputeEnvironment

        assert ComputeEnvironment("LOCAL_MACHINE") is ComputeEnvironment.LOCAL_MACHINE
        ```
    """

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DDPCommunicationHookType(StringEnum):
    """How DDP compresses gradients for its all-reduce.

    ``FP16`` and ``BF16`` send them in that type. ``POWER_SGD`` sends two thin matrices in place of each gradient.
    ``BATCHED_POWER_SGD`` is refused, because it fails inside of torch. ``NO`` sends them as they are.

    References: ``torch.distributed.algorithms.ddp_comm_hooks``; Vogels et al., PowerSGD, NeurIPS 2019.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
        accelerator = Accelerator(kwargs_handlers=[handler])
        model = accelerator.prepare(torch.nn.Linear(4, 1))  # gradients travel in bfloat16
        accelerator.backward(model(torch.randn(8, 4)).square().mean())
        ```
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"
