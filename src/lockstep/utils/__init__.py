"""Names that scripts import from ``accelerate.utils``, each imported when it is first used. Re-exports only."""

from __future__ import annotations

from typing import Any

from lockstep.lazy import lazy_names

_MODULE_OF = {
    "align_module_device": "lockstep.offload.dispatch.storage",
    "AutocastKwargs": "lockstep.config.handlers",
    "broadcast": "lockstep.comm.functional",
    "broadcast_object_list": "lockstep.comm.functional",
    "check_device_map": "lockstep.offload.device_map.placement",
    "clear_device_cache": "lockstep.runtime.memory",
    "clear_environment": "lockstep.config.sources",
    "compare_versions": "lockstep.runtime.available",
    "compute_module_sizes": "lockstep.offload.device_map.memory",
    "compute_module_total_buffer_size": "lockstep.offload.device_map.memory",
    "ComputeEnvironment": "lockstep.config.enums",
    "concatenate": "lockstep.comm.tree",
    "convert_to_fp32": "lockstep.comm.tree:to_float32",
    "DataLoaderConfiguration": "lockstep.config.handlers",
    "DDPCommunicationHookType": "lockstep.config.enums",
    "DeepSpeedPlugin": "lockstep.compat.deepspeed.plugin",
    "DistributedDataParallelKwargs": "lockstep.config.handlers",
    "DistributedType": "lockstep.config.enums",
    "DummyOptim": "lockstep.compat.deepspeed.optimizers",
    "DummyScheduler": "lockstep.compat.deepspeed.optimizers",
    "DynamoBackend": "lockstep.config.enums",
    "extract_model_from_parallel": "lockstep.parallel.parallel_model",
    "find_batch_size": "lockstep.comm.tree",
    "find_executable_batch_size": "lockstep.runtime.memory",
    "find_tied_parameters": "lockstep.offload.device_map.placement",
    "FullyShardedDataParallelPlugin": "lockstep.compat.fsdp.plugin",
    "gather": "lockstep.comm.functional",
    "gather_object": "lockstep.comm.functional",
    "get_balanced_memory": "lockstep.offload.device_map.memory",
    "get_max_layer_size": "lockstep.offload.device_map.memory",
    "get_max_memory": "lockstep.offload.device_map.memory",
    "get_state_dict_offloaded_model": "lockstep.offload.dispatch.storage",
    "GradientAccumulationPlugin": "lockstep.config.handlers",
    "GradScalerKwargs": "lockstep.config.handlers",
    "has_offloaded_params": "lockstep.offload.dispatch.storage",
    "has_version": "lockstep.runtime.available",
    "infer_auto_device_map": "lockstep.offload.device_map.infer",
    "InitProcessGroupKwargs": "lockstep.config.handlers",
    "is_4bit_bnb_available": "lockstep.runtime.available",
    "is_8bit_bnb_available": "lockstep.runtime.available",
    "is_aim_available": "lockstep.runtime.available",
    "is_available": "lockstep.runtime.available",
    "is_bf16_available": "lockstep.runtime.available",
    "is_bnb_available": "lockstep.runtime.available",
    "is_boto3_available": "lockstep.runtime.available",
    "is_clearml_available": "lockstep.runtime.available",
    "is_comet_ml_available": "lockstep.runtime.available",
    "is_compiled_module": "lockstep.parallel.parallel_model",
    "is_cuda_available": "lockstep.runtime.available",
    "is_datasets_available": "lockstep.runtime.available",
    "is_deepspeed_available": "lockstep.runtime.available",
    "is_dvclive_available": "lockstep.runtime.available",
    "is_fp16_available": "lockstep.runtime.available",
    "is_fp8_available": "lockstep.runtime.available",
    "is_hpu_available": "lockstep.runtime.available",
    "is_lomo_available": "lockstep.runtime.available",
    "is_matplotlib_available": "lockstep.runtime.available",
    "is_megatron_lm_available": "lockstep.runtime.available",
    "is_mlflow_available": "lockstep.runtime.available",
    "is_mlu_available": "lockstep.runtime.available",
    "is_mps_available": "lockstep.runtime.available",
    "is_msamp_available": "lockstep.runtime.available",
    "is_musa_available": "lockstep.runtime.available",
    "is_npu_available": "lockstep.runtime.available",
    "is_numpy_available": "lockstep.runtime.available",
    "is_pandas_available": "lockstep.runtime.available",
    "is_peft_available": "lockstep.runtime.available",
    "is_pynvml_available": "lockstep.runtime.available",
    "is_pytest_available": "lockstep.runtime.available",
    "is_rich_available": "lockstep.runtime.available",
    "is_rocm_available": "lockstep.runtime.available",
    "is_sagemaker_available": "lockstep.runtime.available",
    "is_schedulefree_available": "lockstep.runtime.available",
    "is_sdaa_available": "lockstep.runtime.available",
    "is_swanlab_available": "lockstep.runtime.available",
    "is_tensorboard_available": "lockstep.runtime.available",
    "is_timm_available": "lockstep.runtime.available",
    "is_torch_distributed_available": "lockstep.runtime.available",
    "is_torch_tensor": "lockstep.comm.functional",
    "is_torch_version": "lockstep.runtime.available",
    "is_torch_xla_available": "lockstep.runtime.available",
    "is_torchao_available": "lockstep.runtime.available",
    "is_torchdata_available": "lockstep.runtime.available",
    "is_torchdata_stateful_dataloader_available": "lockstep.runtime.available",
    "is_torchvision_available": "lockstep.runtime.available",
    "is_tqdm_available": "lockstep.runtime.available",
    "is_trackio_available": "lockstep.runtime.available",
    "is_transformer_engine_available": "lockstep.runtime.available",
    "is_transformers_available": "lockstep.runtime.available",
    "is_triton_available": "lockstep.runtime.available",
    "is_wandb_available": "lockstep.runtime.available",
    "is_xpu_available": "lockstep.runtime.available",
    "KwargsHandler": "lockstep.config.handlers",
    "listify": "lockstep.comm.tree",
    "load_checkpoint_in_model": "lockstep.offload.dispatch.loading",
    "LoggerType": "lockstep.config.enums",
    "offload_state_dict": "lockstep.offload.dispatch.storage",
    "pad_across_processes": "lockstep.comm.functional",
    "Parallel": "lockstep.config.parallel",
    "patch_environment": "lockstep.config.sources",
    "PrecisionType": "lockstep.config.enums",
    "ProfileKwargs": "lockstep.config.handlers",
    "ProjectConfiguration": "lockstep.config.handlers",
    "recursively_apply": "lockstep.comm.functional",
    "reduce": "lockstep.comm.functional",
    "release_memory": "lockstep.runtime.memory",
    "RNGType": "lockstep.config.enums",
    "SAFE_WEIGHTS_INDEX_NAME": "lockstep.checkpoint.weights:INDEX",
    "SAFE_WEIGHTS_NAME": "lockstep.checkpoint.weights:WEIGHTS",
    "save": "lockstep.checkpoint.weights.model",
    "send_to_device": "lockstep.comm.tree",
    "set_seed": "lockstep.runtime.seed",
    "slice_tensors": "lockstep.comm.functional",
    "str_to_bool": "lockstep.config.sources",
    "synchronize_rng_states": "lockstep.runtime.seed",
    "TorchDynamoPlugin": "lockstep.config.handlers",
    "tqdm": "lockstep.observe.log",
    "wait_for_everyone": "lockstep.comm.functional",
    "WEIGHTS_INDEX_NAME": "lockstep.checkpoint.weights:PICKLED_INDEX",
    "WEIGHTS_NAME": "lockstep.checkpoint.weights:PICKLED_WEIGHTS",
}

__all__ = sorted(_MODULE_OF)

_own = lazy_names(__name__, _MODULE_OF)


def __getattr__(name: str) -> Any:
    return _own(name) if name in _MODULE_OF else _of_accelerate(name)


def _of_accelerate(name: str) -> object:
    """Return what ``accelerate.utils`` has under this name, from the module where it is here."""
    from lockstep.compat.accelerate.interface import GATHERING, NotOffered, find

    found = None if name.startswith("_") else find(GATHERING, name)
    if found is None:
        raise AttributeError(f"module 'lockstep.utils' has no attribute '{name}'")
    if isinstance(found, NotOffered):
        raise AttributeError(found.sentence(GATHERING, name))
    value = globals()[name] = found.load()
    return value


def __dir__() -> list[str]:
    from lockstep.compat.accelerate.interface import GATHERING, names_in

    return sorted({*globals(), *_MODULE_OF, *names_in(GATHERING)})
