"""The names of Accelerate, by its modules: where each of them is here, or why it is not offered. Data only.

``OFFERED``: module of Accelerate -> module of ours -> names; ``name=other`` where ours is called ``other``.
``NOT_OFFERED``: reason, with what to do instead -> module of Accelerate -> names.
``accelerate.utils`` has the names of all modules below it as well.
"""

from __future__ import annotations

OFFERED: dict[str, dict[str, str]] = {
    "accelerate": {
        "lockstep": """
            Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration
            DistributedDataParallelKwargs DistributedType GradScalerKwargs InitProcessGroupKwargs PartialState
            ProfileKwargs cpu_offload cpu_offload_with_hook debug_launcher disk_offload dispatch_model
            find_executable_batch_size infer_auto_device_map init_empty_weights init_on_device
            load_checkpoint_and_dispatch notebook_launcher skip_first_batches synchronize_rng_states
        """,
        "lockstep.utils": """
            DeepSpeedPlugin FullyShardedDataParallelPlugin is_rich_available load_checkpoint_in_model
        """,
        "lockstep.inference": "prepare_pippy",
        "lockstep.parallelism_config": "ParallelismConfig",
    },
    "accelerate.accelerator": {
        "lockstep": "Accelerator",
        "lockstep.utils.constants": """
            DTENSOR_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP_PYTORCH_VERSION MODEL_NAME PROFILE_PATTERN_NAME
            SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SCALER_NAME WEIGHTS_INDEX_NAME
            WEIGHTS_NAME WEIGHTS_PATTERN_NAME
        """,
    },
    "accelerate.big_modeling": {
        "lockstep.big_modeling": """
            attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload dispatch_model
            init_empty_weights init_on_device load_checkpoint_and_dispatch
        """,
        "lockstep.utils": "check_device_map infer_auto_device_map load_checkpoint_in_model",
        "lockstep.utils.constants": "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    },
    "accelerate.checkpointing": {
        "lockstep.utils.constants": """
            MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_NAME SAMPLER_NAME SCALER_NAME
            SCHEDULER_NAME WEIGHTS_NAME
        """,
    },
    "accelerate.data_loader": {
        "lockstep.data_loader": """
            DataLoaderDispatcher DataLoaderShard prepare_data_loader skip_first_batches
        """,
    },
    "accelerate.hooks": {
        "lockstep.hooks": """
            AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook
            add_hook_to_module attach_align_device_hook attach_align_device_hook_on_blocks
            attach_execution_device_hook remove_hook_from_module remove_hook_from_submodules
        """,
    },
    "accelerate.inference": {"lockstep.inference": "prepare_pippy"},
    "accelerate.launchers": {"lockstep.launchers": "debug_launcher notebook_launcher"},
    "accelerate.local_sgd": {"lockstep.local_sgd": "LocalSGD"},
    "accelerate.logging": {"lockstep.logging": "MultiProcessAdapter get_logger"},
    "accelerate.memory_utils": {
        "lockstep.utils.memory": "find_executable_batch_size release_memory clear_device_cache"
    },
    "accelerate.optimizer": {"lockstep.optimizer": "AcceleratedOptimizer"},
    "accelerate.parallelism_config": {"lockstep.parallelism_config": "ParallelismConfig"},
    "accelerate.scheduler": {"lockstep.scheduler": "AcceleratedScheduler"},
    "accelerate.state": {
        "lockstep.state": "AcceleratorState DistributedType GradientState PartialState do_nothing is_initialized",
    },
    "accelerate.tracking": {
        "lockstep.tracking": """
            AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker MLflowTracker SwanLabTracker
            TensorBoardTracker TrackioTracker WandBTracker on_main_process
        """,
    },
    "accelerate.utils": {
        "lockstep.parallelism_config": "ParallelismConfig",
    },
    "accelerate.utils.constants": {
        "lockstep.utils.constants": """
            BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION
            BETA_TP_AVAILABLE_TRANSFORMERS_VERSION CUDA_DISTRIBUTED_TYPES DEEPSPEED_MULTINODE_LAUNCHERS
            DTENSOR_PYTORCH_VERSION ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION
            FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME FSDP_PYTORCH_VERSION
            FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME
            OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME
            SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
            STR_OPERATION_TO_FUNC SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DISTRIBUTED_OPERATION_TYPES
            TORCH_DYNAMO_MODES TORCH_LAUNCH_PARAMS WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
            XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
        """,
    },
    "accelerate.utils.dataclasses": {
        "lockstep.utils.dataclasses": """
            AutocastKwargs BaseEnum BnbQuantizationConfig ComputeEnvironment CustomDtype DDPCommunicationHookType
            DataLoaderConfiguration DeepSpeedPlugin DeepSpeedSequenceParallelConfig DistributedDataParallelKwargs
            DistributedType DynamoBackend FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
            InitProcessGroupKwargs KwargsHandler LoggerType PrecisionType ProfileKwargs ProjectConfiguration RNGType
            TensorInformation TorchContextParallelConfig TorchDynamoPlugin TorchTensorParallelConfig
            TorchTensorParallelPlugin get_module_class_from_name
        """,
    },
    "accelerate.utils.deepspeed": {
        "lockstep.utils.deepspeed": """
            DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler
            HfDeepSpeedConfig get_active_deepspeed_plugin
        """,
    },
    "accelerate.utils.environment": {
        "lockstep.utils.environment": "clear_environment patch_environment str_to_bool",
    },
    "accelerate.utils.fsdp_utils": {
        "lockstep.utils.fsdp_utils": """
            FSDP_MODEL_NAME OPTIMIZER_NAME SAFE_WEIGHTS_NAME WEIGHTS_NAME disable_fsdp_ram_efficient_loading
            enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_canonicalize_names
            fsdp2_load_full_state_dict get_fsdp2_grad_scaler get_parameters_from_modules load_fsdp_model
            load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer
        """,
    },
    "accelerate.utils.imports": {
        "lockstep.utils.imports": """
            is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_bf16_available is_bnb_available
            is_boto3_available is_clearml_available is_comet_ml_available is_cuda_available is_datasets_available
            is_deepspeed_available is_dvclive_available is_fp16_available is_fp8_available is_hpu_available
            is_lomo_available is_matplotlib_available is_megatron_lm_available is_mlflow_available is_mlu_available
            is_mps_available is_msamp_available is_musa_available is_npu_available is_numpy_available
            is_pandas_available is_peft_available is_pynvml_available is_pytest_available is_rich_available
            is_rocm_available is_sagemaker_available is_schedulefree_available is_sdaa_available
            is_swanlab_available is_tensorboard_available is_timm_available is_torch_distributed_available
            is_torch_xla_available is_torchao_available is_torchdata_available
            is_torchdata_stateful_dataloader_available is_torchvision_available is_tqdm_available
            is_trackio_available is_transformer_engine_available is_transformers_available is_triton_available
            is_wandb_available is_xpu_available
        """,
    },
    "accelerate.utils.memory": {
        "lockstep.utils.memory": """
            clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size
        """,
    },
    "accelerate.utils.modeling": {
        "lockstep.utils.modeling": """
            SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME align_module_device calculate_maximum_sizes
            check_device_map check_device_same check_tied_parameters_in_config check_tied_parameters_on_same_device
            clean_device_map compute_module_sizes compute_module_total_buffer_size convert_file_size_to_int
            dtype_byte_size find_tied_parameters get_balanced_memory get_grad_scaler get_max_layer_size
            get_max_memory get_mixed_precision_context_manager get_module_leaves get_non_persistent_buffers
            get_state_dict_from_offload get_state_dict_offloaded_model has_offloaded_params id_tensor_storage
            infer_auto_device_map is_peft_model load_checkpoint_in_model load_offloaded_weights load_state_dict
            named_module_tensors retie_parameters set_module_tensor_to_device
        """,
    },
    "accelerate.utils.offload": {
        "lockstep.utils.offload": """
            OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight
            offload_state_dict offload_weight save_offload_index
        """,
    },
    "accelerate.utils.operations": {
        "lockstep.utils.operations": """
            DistributedOperationException broadcast broadcast_object_list concatenate convert_to_fp32 find_batch_size
            gather gather_object is_torch_tensor listify pad_across_processes recursively_apply reduce
            send_to_device slice_tensors
        """,
    },
    "accelerate.utils.other": {
        "lockstep.utils.other": """
            clear_environment extract_model_from_parallel is_compiled_module load patch_environment save
            wait_for_everyone
        """,
    },
    "accelerate.utils.random": {
        "lockstep.utils.random": "set_seed synchronize_rng_states",
    },
    "accelerate.utils.tqdm": {"lockstep.utils": "tqdm"},
    "accelerate.utils.versions": {"lockstep.utils.versions": "compare_versions is_torch_version"},
}

NOT_OFFERED: dict[str, dict[str, str]] = {}
