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
            DistributedDataParallelKwargs DistributedType GradScalerKwargs InitProcessGroupKwargs
            PartialState ProfileKwargs cpu_offload cpu_offload_with_hook debug_launcher
            disk_offload dispatch_model find_executable_batch_size infer_auto_device_map
            init_empty_weights init_on_device load_checkpoint_and_dispatch notebook_launcher
            skip_first_batches synchronize_rng_states
        """,
        "lockstep.utils": """
            DeepSpeedPlugin FullyShardedDataParallelPlugin is_rich_available
            load_checkpoint_in_model
        """,
        "lockstep.inference": "prepare_pippy",
        "lockstep.parallelism_config": "ParallelismConfig",
    },
    "accelerate.accelerator": {
        "lockstep": "Accelerator",
        "lockstep.tracking": "LOGGER_TYPE_TO_CLASS",
        "lockstep.utils.constants": "SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME",
    },
    "accelerate.big_modeling": {
        "lockstep.big_modeling": """
            cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights
            init_on_device load_checkpoint_and_dispatch
        """,
        "lockstep.utils": "check_device_map infer_auto_device_map load_checkpoint_in_model",
    },
    "accelerate.checkpointing": {
        "lockstep.utils.constants": "OPTIMIZER_NAME SAFE_WEIGHTS_NAME WEIGHTS_NAME",
    },
    "accelerate.commands.accelerate_cli": {
        "lockstep.cli.main": "main",
    },
    "accelerate.commands.config": {
        "lockstep.cli.accelerate_commands": "default_config_file load_config_from_file",
    },
    "accelerate.commands.config.cluster": {
        "lockstep.utils.constants": "FSDP_AUTO_WRAP_POLICY FSDP_SHARDING_STRATEGY",
    },
    "accelerate.commands.config.config_args": {
        "lockstep.cli.accelerate_commands": "default_config_file load_config_from_file",
    },
    "accelerate.commands.config.default": {
        "lockstep.cli.accelerate_commands": "write_basic_config",
    },
    "accelerate.commands.launch": {
        "lockstep.cli.accelerate_commands": "default_config_file launch_command launch_command_parser",
    },
    "accelerate.data_loader": {
        "lockstep.data_loader": """
            SeedableRandomSampler SkipBatchSampler prepare_data_loader skip_first_batches
        """,
    },
    "accelerate.hooks": {
        "lockstep.hooks": """
            AlignDevicesHook CpuOffload ModelHook SequentialHook UserCpuOffloadHook
            add_hook_to_module attach_align_device_hook attach_align_device_hook_on_blocks
            attach_execution_device_hook remove_hook_from_module remove_hook_from_submodules
        """,
    },
    "accelerate.inference": {
        "lockstep.inference": "prepare_pippy",
    },
    "accelerate.launchers": {
        "lockstep.launchers": "debug_launcher notebook_launcher",
    },
    "accelerate.local_sgd": {
        "lockstep.local_sgd": "LocalSGD",
    },
    "accelerate.logging": {
        "lockstep.logging": "MultiProcessAdapter get_logger",
    },
    "accelerate.memory_utils": {
        "lockstep.utils.memory": "clear_device_cache find_executable_batch_size release_memory",
    },
    "accelerate.optimizer": {
        "lockstep.optimizer": "AcceleratedOptimizer",
    },
    "accelerate.parallelism_config": {
        "lockstep.parallelism_config": "ParallelismConfig",
    },
    "accelerate.scheduler": {
        "lockstep.scheduler": "AcceleratedScheduler",
    },
    "accelerate.state": {
        "lockstep.state": "AcceleratorState DistributedType GradientState PartialState is_initialized",
    },
    "accelerate.tracking": {
        "lockstep.tracking": """
            AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker
            LOGGER_TYPE_TO_CLASS MLflowTracker SwanLabTracker TensorBoardTracker TrackioTracker
            WandBTracker get_available_trackers on_main_process
            register_tracker_class
        """,
    },
    "accelerate.utils": {
        "lockstep.parallelism_config": "ParallelismConfig",
        "lockstep.cli.accelerate_commands": "write_basic_config",
    },
    "accelerate.utils.ao": {
        "lockstep.utils.ao": "convert_model_to_fp8_ao filter_linear_layers find_first_last_linear_layers",
    },
    "accelerate.utils.constants": {
        "lockstep.utils.constants": """
            FSDP_AUTO_WRAP_POLICY FSDP_MODEL_NAME FSDP_SHARDING_STRATEGY OPTIMIZER_NAME
            SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME
        """,
    },
    "accelerate.utils.dataclasses": {
        "lockstep.utils.dataclasses": """
            AutocastKwargs BaseEnum ComputeEnvironment CustomDtype DDPCommunicationHookType
            DataLoaderConfiguration DeepSpeedPlugin DeepSpeedSequenceParallelConfig
            DistributedDataParallelKwargs DistributedType DynamoBackend
            FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
            InitProcessGroupKwargs KwargsHandler LoggerType PrecisionType ProfileKwargs
            ProjectConfiguration RNGType TorchContextParallelConfig TorchDynamoPlugin
            TorchTensorParallelConfig get_module_class_from_name
        """,
        "lockstep.utils.constants": "FSDP_AUTO_WRAP_POLICY FSDP_SHARDING_STRATEGY",
        "lockstep.config.fp8": "AORecipeKwargs FP8BackendType FP8RecipeKwargs TERecipeKwargs",
        "lockstep.config.enums": "EnumWithContains",
    },
    "accelerate.utils.deepspeed": {
        "lockstep.utils.deepspeed": """
            DeepSpeedSchedulerWrapper DummyOptim DummyScheduler HfDeepSpeedConfig
            get_active_deepspeed_plugin
        """,
    },
    "accelerate.utils.environment": {
        "lockstep.utils.environment": """
            check_cuda_fp8_capability check_cuda_p2p_ib_support clear_environment
            patch_environment str_to_bool
        """,
    },
    "accelerate.utils.fsdp_utils": {
        "lockstep.utils.fsdp_utils": """
            FSDP_MODEL_NAME OPTIMIZER_NAME SAFE_WEIGHTS_NAME WEIGHTS_NAME
            fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model
            get_parameters_from_modules load_fsdp_model load_fsdp_optimizer merge_fsdp_weights
            save_fsdp_model save_fsdp_optimizer
        """,
    },
    "accelerate.utils.imports": {
        "lockstep.utils.imports": """
            is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_bf16_available
            is_bnb_available is_boto3_available is_clearml_available is_comet_ml_available
            is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available
            is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available
            is_import_timer_available is_lomo_available is_matplotlib_available
            is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available
            is_msamp_available is_musa_available is_neuron_available is_npu_available
            is_numpy_available is_pandas_available is_peft_available is_pippy_available
            is_pynvml_available is_pytest_available is_rich_available is_rocm_available
            is_sagemaker_available is_schedulefree_available is_sdaa_available
            is_swanlab_available is_tensorboard_available is_timm_available
            is_torch_distributed_available is_torch_xla_available is_torchao_available
            is_torchdata_available is_torchdata_stateful_dataloader_available
            is_torchvision_available is_tqdm_available is_trackio_available
            is_transformer_engine_available is_transformer_engine_mxfp8_available
            is_transformers_available is_triton_available is_wandb_available is_xpu_available
        """,
    },
    "accelerate.utils.launch": {
        "lockstep.utils.launch": "PrepareForLaunch",
    },
    "accelerate.utils.memory": {
        "lockstep.utils.memory": """
            clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size
        """,
    },
    "accelerate.utils.modeling": {
        "lockstep.utils.modeling": """
            SAFE_WEIGHTS_NAME WEIGHTS_NAME align_module_device calculate_maximum_sizes
            check_device_map check_tied_parameters_in_config check_tied_parameters_on_same_device
            clean_device_map compute_module_sizes convert_file_size_to_int dtype_byte_size
            find_tied_parameters get_balanced_memory get_grad_scaler get_max_layer_size
            get_max_memory get_non_persistent_buffers get_state_dict_offloaded_model
            has_offloaded_params infer_auto_device_map is_peft_model load_checkpoint_in_model
            load_offloaded_weights load_state_dict named_module_tensors retie_parameters
            set_module_tensor_to_device
        """,
        "lockstep.utils": "WEIGHTS_INDEX_NAME compute_module_total_buffer_size",
    },
    "accelerate.utils.offload": {
        "lockstep.utils.offload": "offload_state_dict offload_weight save_offload_index",
    },
    "accelerate.utils.operations": {
        "lockstep.utils.operations": """
            CannotPadNestedTensorWarning ConvertOutputsToFp32 DistributedOperationException
            GatheredParameters broadcast broadcast_object_list concatenate convert_outputs_to_fp32
            convert_to_fp32 copy_tensor_to_devices find_batch_size find_device gather gather_object is_torch_tensor
            listify pad_across_processes recursively_apply reduce send_to_device slice_tensors
        """,
    },
    "accelerate.utils.other": {
        "lockstep.utils.other": """
            clear_environment compile_regions convert_bytes
            extract_model_from_parallel get_module_children_bottom_up has_repeated_blocks
            is_compiled_module is_repeated_blocks patch_environment save wait_for_everyone
        """,
    },
    "accelerate.utils.random": {
        "lockstep.utils.random": "set_seed synchronize_rng_states",
    },
    "accelerate.utils.tqdm": {
        "lockstep.utils": "tqdm",
    },
    "accelerate.utils.versions": {
        "lockstep.utils.versions": "compare_versions is_torch_version",
    },
}

NOT_OFFERED: dict[str, dict[str, str]] = {
    "it belongs to Megatron-LM's engine. Use parallel='tp=2 pp=2', for instance.": {
        "accelerate.utils.dataclasses": """
            MODEL_CONFIGS_TO_MEGATRON_PARSERS MegatronLMPlugin add_model_config_to_megatron_parser
            parse_bert_config parse_glm4_moe_config parse_gpt2_config parse_llama_config
            parse_t5_config
        """,
        "accelerate.utils.megatron_lm": """
            AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader
            MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper
            T5TrainStep avg_losses_across_data_parallel_group finish_mpu_init
            gather_across_data_parallel_groups initialize model_provider_func prepare_data_loader
            prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler
        """,
    },
    "it belongs to Amazon SageMaker, which is not supported. Start the script with lockstep launch.": {
        "accelerate.commands.config.config_args": """
            SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION SAGEMAKER_TRANSFORMERS_VERSION
            SageMakerConfig
        """,
        "accelerate.commands.config.sagemaker": """
            DYNAMO_BACKENDS SAGEMAKER_PARALLEL_EC2_INSTANCES TORCH_DYNAMO_MODES
            get_sagemaker_input
        """,
        "accelerate.commands.launch": "sagemaker_launcher",
        "accelerate.utils.constants": """
            SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION
            SAGEMAKER_TRANSFORMERS_VERSION
        """,
        "accelerate.utils.dataclasses": "SageMakerDistributedType",
        "accelerate.utils.launch": "prepare_sagemager_args_inputs",
    },
    "it belongs to TPUs, which are not supported. Use GPUs or CPUs.": {
        "accelerate.commands.launch": "tpu_launcher tpu_pod_launcher",
        "accelerate.commands.tpu": "default_config_file main tpu_command_launcher tpu_command_parser",
        "accelerate.utils.imports": "USE_TORCH_XLA",
        "accelerate.utils.launch": "prepare_tpu",
        "accelerate.utils.torch_xla": "install_xla",
    },
    "it belongs to MS-AMP, which is not supported. Use AORecipeKwargs.": {
        "accelerate.utils.dataclasses": "MSAMPRecipeKwargs",
    },
    "its answers are fields of a file of Accelerate, which cannot say all that lockstep config asks. Use that.": {
        "accelerate.commands.config.cluster": "get_cluster_input",
        "accelerate.commands.config.config": "get_user_input",
    },
    "models of the Hub are counted without making them. Use lockstep estimate.": {
        "accelerate.commands.estimate": """
            add_timm_hub_prefix check_has_model create_ascii_table create_empty_model gather_data
            verify_on_hub
        """,
    },
    "it is a step inside of a command. Lockstep reads files for FSDP 1 as they are.": {
        "accelerate.commands.to_fsdp2": "ARGUMENT_KEY_MAPPING ARGUMENT_VALUE_MAPPING ConversionStatus",
    },
    "processes are started in another way. Use lockstep launch, and its --dry-run to see what would run.": {
        "accelerate.commands.launch": """
            CustomHelpFormatter deepspeed_launcher multi_gpu_launcher options_to_group
            simple_launcher
        """,
        "accelerate.utils.launch": """
            prepare_deepspeed_cmd_env prepare_extend_env_parallelism_config prepare_multi_gpu_env
            prepare_simple_launcher_cmd_env
        """,
    },
    "no program is known to import it. Write its value in the script itself.": {
        "accelerate.accelerator": """
            DTENSOR_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP_PYTORCH_VERSION MODEL_NAME
            PROFILE_PATTERN_NAME SAFE_WEIGHTS_PATTERN_NAME SCALER_NAME WEIGHTS_PATTERN_NAME
        """,
        "accelerate.big_modeling": "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
        "accelerate.checkpointing": """
            MODEL_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        """,
        "accelerate.commands.config.cluster": """
            DEEPSPEED_MULTINODE_LAUNCHERS FSDP2_STATE_DICT_TYPE FSDP_BACKWARD_PREFETCH
            FSDP_STATE_DICT_TYPE TORCH_DYNAMO_MODES
        """,
        "accelerate.commands.launch": "DEEPSPEED_MULTINODE_LAUNCHERS TORCH_DYNAMO_MODES",
        "accelerate.launchers": "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
        "accelerate.utils.constants": """
            BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION
            BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
            CUDA_DISTRIBUTED_TYPES DEEPSPEED_MULTINODE_LAUNCHERS DTENSOR_PYTORCH_VERSION
            ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION
            FSDP2_STATE_DICT_TYPE FSDP_BACKWARD_PREFETCH FSDP_PYTORCH_VERSION FSDP_STATE_DICT_TYPE
            MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME PROFILE_PATTERN_NAME
            RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME
            SCHEDULER_NAME STR_OPERATION_TO_FUNC SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
            TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_DYNAMO_MODES TORCH_LAUNCH_PARAMS
            WEIGHTS_PATTERN_NAME XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
        """,
        "accelerate.utils.dataclasses": """
            BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION
            BETA_TP_AVAILABLE_TRANSFORMERS_VERSION FSDP2_PYTORCH_VERSION FSDP_BACKWARD_PREFETCH
            MITA_PROFILING_AVAILABLE_PYTORCH_VERSION XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
        """,
        "accelerate.utils.versions": "STR_OPERATION_TO_FUNC",
    },
    "no program is known to import it. Use accelerator.save_state and load_state.": {
        "accelerate.checkpointing": """
            load_accelerator_state load_custom_state save_accelerator_state save_custom_state
        """,
    },
    "no program is known to import it. Call the command itself, such as lockstep config.": {
        "accelerate.commands.config": "get_config_parser main",
        "accelerate.commands.config.cluster": "DYNAMO_BACKENDS",
        "accelerate.commands.config.default": "default_command_parser default_config_command",
        "accelerate.commands.config.config": "config_command config_command_parser main",
        "accelerate.commands.config.config_utils": "DYNAMO_BACKENDS SubcommandHelpFormatter",
        "accelerate.commands.config.update": "update_command_parser update_config update_config_command",
        "accelerate.commands.env": "env_command env_command_parser main",
        "accelerate.commands.estimate": "estimate_command estimate_command_parser estimate_training_usage main",
        "accelerate.commands.merge": "main merge_command merge_command_parser",
        "accelerate.commands.test": "main test_command test_command_parser",
        "accelerate.commands.to_fsdp2": "convert_config_to_fsdp2 load_config to_fsdp2_command to_fsdp2_command_parser",
        "accelerate.commands.utils": "CustomArgumentGroup CustomArgumentParser",
        "accelerate.commands.launch": "DYNAMO_BACKENDS clean_option main",
    },
    "no program is known to import it. Read a file by load_config_from_file, and write one by lockstep config.": {
        "accelerate.commands.config.config_args": "BaseConfig ClusterConfig",
    },
    "no program is known to import it. Pass a torch DataLoader to accelerator.prepare, or to prepare_data_loader.": {
        "accelerate.data_loader": """
            BatchSamplerShard DataLoaderAdapter DataLoaderDispatcher DataLoaderShard
            DataLoaderStateMixin IterableDatasetShard SkipDataLoader get_sampler
        """,
    },
    "no program is known to import it. Use prepare_pippy, or parallel='pp=2'.": {
        "accelerate.inference": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward",
    },
    "no program is known to import it. Use what accelerator.prepare returns.": {
        "accelerate.optimizer": "move_to_device patch_optimizer_step",
    },
    "no program is known to import it. Write it in the script itself.": {
        "accelerate.state": "ThreadLocalSharedDict do_nothing",
        "accelerate.utils.other": """
            FSDP_PYTORCH_VERSION check_os_kernel clean_state_dict_for_safetensors get_free_port
            get_model_tp_size get_pretty_name is_port_in_use merge_dicts model_has_dtensor
            recursive_getattr
        """,
    },
    "no program is known to import it. Use convert_model_to_fp8_ao, or mixed_precision='fp8'.": {
        "accelerate.utils.ao": "filter_first_and_last_linear_layers has_ao_layers",
    },
    "weights of 4 or 8 bits are the model library's. Load them by transformers' BitsAndBytesConfig.": {
        "accelerate.utils.bnb": """
            get_keys_to_not_convert get_parameter_device get_quantized_model_device_map
            has_4bit_bnb_layers load_and_quantize_model quantize_and_offload_8bit
            replace_with_bnb_layers
        """,
        "accelerate.utils.dataclasses": "BnbQuantizationConfig",
    },
    "no program is known to import it. Use gather, broadcast or reduce, which compare the ranks' tensors.": {
        "accelerate.utils.dataclasses": "TensorInformation",
        "accelerate.utils.operations": """
            TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT TORCH_DISTRIBUTED_OPERATION_TYPES
            chained_operation gather_tensor_shape get_data_structure
            get_shape honor_type ignorant_find_batch_size initialize_tensors is_namedtuple
            is_tensor_information is_torch_xpu_tensor pad_input_tensors verify_operation
        """,
    },
    "no program is known to import it. Leave it out: sizes of axes are parallel='tp=2', for instance.": {
        "accelerate.utils.dataclasses": "TorchTensorParallelPlugin",
    },
    "no program is known to import it. Use parallel='zero=3 offload=optimizer'.": {
        "accelerate.utils.deepspeed": "map_pytorch_optim_to_deepspeed",
    },
    "no program is known to import it. Read os.environ, torch.cuda or PartialState in the script itself.": {
        "accelerate.utils.environment": """
            CPUInformation are_libraries_initialized convert_dict_to_env_variables
            get_cpu_distributed_information get_current_device_type get_driver_version
            get_gpu_info get_int_from_env override_numa_affinity parse_choice_from_env
            parse_flag_from_env purge_accelerate_environment set_numa_affinity
        """,
    },
    "no program is known to import it. accelerator.prepare shards a model and its optimizer. Use that.": {
        "accelerate.utils.fsdp_utils": """
            disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading
            ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names
            fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler
        """,
    },
    "no program is known to import it. Ask importlib.util.find_spec for the package, or torch for the device.": {
        "accelerate.utils.imports": """
            deepspeed_required is_amdsmi_available is_bitsandbytes_multi_backend_available
            is_weights_only_available is_xccl_available torchao_required
        """,
    },
    "no program is known to import it. Use lockstep launch.": {
        "accelerate.utils.launch": "DEEPSPEED_MULTINODE_LAUNCHERS env_var_path_add setup_fp8_env",
    },
    "no program is known to import it. Use infer_auto_device_map, or load_checkpoint_and_dispatch.": {
        "accelerate.utils.modeling": """
            check_device_same fallback_allocate get_mixed_precision_context_manager
            get_module_leaves get_module_size_with_ties get_state_dict_from_offload
            id_tensor_storage
        """,
    },
    "no program is known to import it. Use load_offloaded_weights, or load_checkpoint_and_dispatch.": {
        "accelerate.utils.offload": """
            OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict
            load_offloaded_weight
        """,
    },
    "no program is known to import it. Use compile_regions, or blocks.compile() of the model's blocks.": {
        "accelerate.utils.other": "compile_regions_deepspeed compile_regions_fsdp2 has_compiled_regions",
    },
    "no program is known to import it. Use synchronize_rng_states.": {
        "accelerate.utils.random": "CUDA_DISTRIBUTED_TYPES synchronize_rng_state",
    },
    "no program is known to import it. Call what it calls: torch, or accelerator.prepare.": {
        "accelerate.launchers": "test_launch",
        "accelerate.tracking": "filter_trackers",
        "accelerate.utils.deepspeed": "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper",
        "accelerate.utils.other": "TORCH_SAFE_GLOBALS load",
    },
    "only torchao is used for 8-bit floating point. Use mixed_precision='fp8', with AORecipeKwargs.": {
        "accelerate.utils.transformer_engine": """
            apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers
        """,
    },
    "no program is known to import it. Use enable_layerwise_casting() of diffusers.": {
        "accelerate.big_modeling": "attach_layerwise_casting_hooks",
        "accelerate.hooks": "LayerwiseCastingHook",
    },
}
