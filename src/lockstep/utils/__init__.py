"""Names that scripts import from ``accelerate.utils``. Re-exports only."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.weights import INDEX as SAFE_WEIGHTS_INDEX_NAME
from lockstep.checkpoint.weights import PICKLED_INDEX as WEIGHTS_INDEX_NAME
from lockstep.checkpoint.weights import PICKLED_WEIGHTS as WEIGHTS_NAME
from lockstep.checkpoint.weights import WEIGHTS as SAFE_WEIGHTS_NAME
from lockstep.checkpoint.weights.model import save
from lockstep.comm.functional import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    is_torch_tensor,
    pad_across_processes,
    recursively_apply,
    reduce,
    slice_tensors,
    wait_for_everyone,
)
from lockstep.comm.tree import concatenate, find_batch_size, listify, send_to_device
from lockstep.comm.tree import to_float32 as convert_to_fp32
from lockstep.config.enums import (
    ComputeEnvironment,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
)
from lockstep.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from lockstep.config.parallel import Parallel
from lockstep.config.sources import clear_environment, patch_environment, str_to_bool
from lockstep.observe.log import tqdm
from lockstep.offload.device_map.infer import infer_auto_device_map
from lockstep.offload.device_map.memory import (
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
)
from lockstep.offload.device_map.placement import check_device_map, find_tied_parameters
from lockstep.offload.dispatch.loading import load_checkpoint_in_model
from lockstep.offload.dispatch.storage import (
    align_module_device,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    offload_state_dict,
)
from lockstep.parallel.parallel_model import extract_model_from_parallel, is_compiled_module
from lockstep.runtime.available import *  # noqa: F403  (is_<package>_available)
from lockstep.runtime.memory import clear_device_cache, find_executable_batch_size, release_memory
from lockstep.runtime.seed import set_seed, synchronize_rng_states

if TYPE_CHECKING:
    from lockstep.compat.deepspeed.optimizers import DummyOptim, DummyScheduler
    from lockstep.compat.deepspeed.plugin import DeepSpeedPlugin
    from lockstep.compat.fsdp.plugin import FullyShardedDataParallelPlugin
    from lockstep.utils.other import load

# Imported when a script asks for one of them.
_EXTERNAL = {
    "DeepSpeedPlugin": "lockstep.compat.deepspeed.plugin",
    "DummyOptim": "lockstep.compat.deepspeed.optimizers",
    "DummyScheduler": "lockstep.compat.deepspeed.optimizers",
    "FullyShardedDataParallelPlugin": "lockstep.compat.fsdp.plugin",
    "load": "lockstep.utils.other",
}

__all__ = [
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "AutocastKwargs",
    "ComputeEnvironment",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "Parallel",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TorchDynamoPlugin",
    "align_module_device",
    "broadcast",
    "broadcast_object_list",
    "check_device_map",
    "clear_device_cache",
    "clear_environment",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "concatenate",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "find_tied_parameters",
    "gather",
    "gather_object",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "infer_auto_device_map",
    "is_compiled_module",
    "is_torch_tensor",
    "listify",
    "load",
    "load_checkpoint_in_model",
    "offload_state_dict",
    "pad_across_processes",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "str_to_bool",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]


def __getattr__(name: str) -> Any:
    value = getattr(import_module(_EXTERNAL[name]), name) if name in _EXTERNAL else _of_accelerate(name)
    globals()[name] = value
    return value


def _of_accelerate(name: str) -> Any:
    """What ``accelerate.utils`` has under this name, from the module where it is here."""
    from lockstep.compat.accelerate.interface import GATHERING, NotOffered, find

    found = None if name.startswith("_") else find(GATHERING, name)
    if found is None:
        raise AttributeError(f"module 'lockstep.utils' has no attribute '{name}'")
    if isinstance(found, NotOffered):
        raise AttributeError(found.sentence(GATHERING, name))
    return found.load()


def __dir__() -> list[str]:
    from lockstep.compat.accelerate.interface import GATHERING, names

    return sorted({*globals(), *_EXTERNAL, *names(GATHERING)})
