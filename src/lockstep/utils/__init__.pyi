from typing import Any

from lockstep.checkpoint.weights.model import save as save
from lockstep.comm.functional import broadcast as broadcast
from lockstep.comm.functional import broadcast_object_list as broadcast_object_list
from lockstep.comm.functional import gather as gather
from lockstep.comm.functional import gather_object as gather_object
from lockstep.comm.functional import is_torch_tensor as is_torch_tensor
from lockstep.comm.functional import pad_across_processes as pad_across_processes
from lockstep.comm.functional import recursively_apply as recursively_apply
from lockstep.comm.functional import reduce as reduce
from lockstep.comm.functional import slice_tensors as slice_tensors
from lockstep.comm.functional import wait_for_everyone as wait_for_everyone
from lockstep.comm.tree import concatenate as concatenate
from lockstep.comm.tree import find_batch_size as find_batch_size
from lockstep.comm.tree import listify as listify
from lockstep.comm.tree import send_to_device as send_to_device
from lockstep.comm.tree import to_float32
from lockstep.compat.deepspeed.optimizers import DummyOptim as DummyOptim
from lockstep.compat.deepspeed.optimizers import DummyScheduler as DummyScheduler
from lockstep.compat.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from lockstep.compat.fsdp.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from lockstep.config.enums import ComputeEnvironment as ComputeEnvironment
from lockstep.config.enums import DDPCommunicationHookType as DDPCommunicationHookType
from lockstep.config.enums import DistributedType as DistributedType
from lockstep.config.enums import DynamoBackend as DynamoBackend
from lockstep.config.enums import LoggerType as LoggerType
from lockstep.config.enums import PrecisionType as PrecisionType
from lockstep.config.enums import RNGType as RNGType
from lockstep.config.handlers import AutocastKwargs as AutocastKwargs
from lockstep.config.handlers import DataLoaderConfiguration as DataLoaderConfiguration
from lockstep.config.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from lockstep.config.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from lockstep.config.handlers import GradScalerKwargs as GradScalerKwargs
from lockstep.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from lockstep.config.handlers import KwargsHandler as KwargsHandler
from lockstep.config.handlers import ProfileKwargs as ProfileKwargs
from lockstep.config.handlers import ProjectConfiguration as ProjectConfiguration
from lockstep.config.handlers import TorchDynamoPlugin as TorchDynamoPlugin
from lockstep.config.parallel import Parallel as Parallel
from lockstep.config.sources import clear_environment as clear_environment
from lockstep.config.sources import patch_environment as patch_environment
from lockstep.config.sources import str_to_bool as str_to_bool
from lockstep.observe.log import tqdm as tqdm
from lockstep.offload.device_map.infer import infer_auto_device_map as infer_auto_device_map
from lockstep.offload.device_map.memory import compute_module_sizes as compute_module_sizes
from lockstep.offload.device_map.memory import (
    compute_module_total_buffer_size as compute_module_total_buffer_size,
)
from lockstep.offload.device_map.memory import get_balanced_memory as get_balanced_memory
from lockstep.offload.device_map.memory import get_max_layer_size as get_max_layer_size
from lockstep.offload.device_map.memory import get_max_memory as get_max_memory
from lockstep.offload.device_map.placement import check_device_map as check_device_map
from lockstep.offload.device_map.placement import find_tied_parameters as find_tied_parameters
from lockstep.offload.dispatch.loading import load_checkpoint_in_model as load_checkpoint_in_model
from lockstep.offload.dispatch.storage import align_module_device as align_module_device
from lockstep.offload.dispatch.storage import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from lockstep.offload.dispatch.storage import has_offloaded_params as has_offloaded_params
from lockstep.offload.dispatch.storage import offload_state_dict as offload_state_dict
from lockstep.parallel.parallel_model import extract_model_from_parallel as extract_model_from_parallel
from lockstep.parallel.parallel_model import is_compiled_module as is_compiled_module
from lockstep.runtime.available import compare_versions as compare_versions
from lockstep.runtime.available import has_version as has_version
from lockstep.runtime.available import is_4bit_bnb_available as is_4bit_bnb_available
from lockstep.runtime.available import is_8bit_bnb_available as is_8bit_bnb_available
from lockstep.runtime.available import is_aim_available as is_aim_available
from lockstep.runtime.available import is_available as is_available
from lockstep.runtime.available import is_bf16_available as is_bf16_available
from lockstep.runtime.available import is_bnb_available as is_bnb_available
from lockstep.runtime.available import is_boto3_available as is_boto3_available
from lockstep.runtime.available import is_clearml_available as is_clearml_available
from lockstep.runtime.available import is_comet_ml_available as is_comet_ml_available
from lockstep.runtime.available import is_cuda_available as is_cuda_available
from lockstep.runtime.available import is_datasets_available as is_datasets_available
from lockstep.runtime.available import is_deepspeed_available as is_deepspeed_available
from lockstep.runtime.available import is_dvclive_available as is_dvclive_available
from lockstep.runtime.available import is_fp8_available as is_fp8_available
from lockstep.runtime.available import is_fp16_available as is_fp16_available
from lockstep.runtime.available import is_hpu_available as is_hpu_available
from lockstep.runtime.available import is_lomo_available as is_lomo_available
from lockstep.runtime.available import is_matplotlib_available as is_matplotlib_available
from lockstep.runtime.available import is_megatron_lm_available as is_megatron_lm_available
from lockstep.runtime.available import is_mlflow_available as is_mlflow_available
from lockstep.runtime.available import is_mlu_available as is_mlu_available
from lockstep.runtime.available import is_mps_available as is_mps_available
from lockstep.runtime.available import is_msamp_available as is_msamp_available
from lockstep.runtime.available import is_musa_available as is_musa_available
from lockstep.runtime.available import is_npu_available as is_npu_available
from lockstep.runtime.available import is_numpy_available as is_numpy_available
from lockstep.runtime.available import is_pandas_available as is_pandas_available
from lockstep.runtime.available import is_peft_available as is_peft_available
from lockstep.runtime.available import is_pynvml_available as is_pynvml_available
from lockstep.runtime.available import is_pytest_available as is_pytest_available
from lockstep.runtime.available import is_rich_available as is_rich_available
from lockstep.runtime.available import is_rocm_available as is_rocm_available
from lockstep.runtime.available import is_sagemaker_available as is_sagemaker_available
from lockstep.runtime.available import is_schedulefree_available as is_schedulefree_available
from lockstep.runtime.available import is_sdaa_available as is_sdaa_available
from lockstep.runtime.available import is_swanlab_available as is_swanlab_available
from lockstep.runtime.available import is_tensorboard_available as is_tensorboard_available
from lockstep.runtime.available import is_timm_available as is_timm_available
from lockstep.runtime.available import is_torch_distributed_available as is_torch_distributed_available
from lockstep.runtime.available import is_torch_version as is_torch_version
from lockstep.runtime.available import is_torch_xla_available as is_torch_xla_available
from lockstep.runtime.available import is_torchao_available as is_torchao_available
from lockstep.runtime.available import is_torchdata_available as is_torchdata_available
from lockstep.runtime.available import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from lockstep.runtime.available import is_torchvision_available as is_torchvision_available
from lockstep.runtime.available import is_tqdm_available as is_tqdm_available
from lockstep.runtime.available import is_trackio_available as is_trackio_available
from lockstep.runtime.available import is_transformer_engine_available as is_transformer_engine_available
from lockstep.runtime.available import is_transformers_available as is_transformers_available
from lockstep.runtime.available import is_triton_available as is_triton_available
from lockstep.runtime.available import is_wandb_available as is_wandb_available
from lockstep.runtime.available import is_xpu_available as is_xpu_available
from lockstep.runtime.memory import clear_device_cache as clear_device_cache
from lockstep.runtime.memory import find_executable_batch_size as find_executable_batch_size
from lockstep.runtime.memory import release_memory as release_memory
from lockstep.runtime.seed import set_seed as set_seed
from lockstep.runtime.seed import synchronize_rng_states as synchronize_rng_states

SAFE_WEIGHTS_INDEX_NAME: str
SAFE_WEIGHTS_NAME: str
WEIGHTS_INDEX_NAME: str
WEIGHTS_NAME: str
convert_to_fp32 = to_float32

# What ``accelerate.utils`` has beyond these.
def __getattr__(name: str) -> Any: ...
