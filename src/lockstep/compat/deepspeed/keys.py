"""Every key of a DeepSpeed configuration (of version 0.19.8, and older ones), and what becomes of it.

Reference: https://www.deepspeed.ai/docs/config-json
"""

from __future__ import annotations

import sys

from lockstep.compat.rules import Detail, NoEffect, Refused, Table, Used, same, section
from lockstep.config import readers as read
from lockstep.config.parallel_words import PARSERS
from lockstep.config.values import integer_between, parse_bool

SIZES = "torch's engine gathers and averages one block at a time, whatever its size"
TIMES = "times are measured with lockstep's profiler"
LOGS = "name trackers in Accelerator(log_with=...)"
PRINTS = "the script prints what it wants"
NUMERICS = "the collective itself averages"
FILES = "checkpoints have one form, which any number of processes can read"
DISK = "what is offloaded to disk is read and written block by block, by threads of its own"
COMPILE = "models are compiled with Accelerator(dynamo_backend=...)"
SCALE = "torch halves the loss scale at each overflow, and has no lower bound"
RECOMPUTE = "blocks are recomputed by torch's own checkpointing"

OFFLOAD_PARAM: Table = {
    "device": Used("param_device", read.offload_device),
    "nvme_path": Used("param_folder", read.folder),
    "buffer_count": Detail("device"),
    "buffer_size": Detail("device"),
    "max_in_cpu": Detail("device"),
    "pin_memory": NoEffect("memory is pinned where there is a GPU", (True,)),
}

OFFLOAD_OPTIMIZER: Table = {
    "device": Used("optimizer_device", read.offload_device),
    "nvme_path": Used("optimizer_folder", read.folder),
    "buffer_count": Detail("device"),
    "pin_memory": NoEffect("memory is pinned where there is a GPU", (True,)),
    "pipeline": Detail("device"),
    "pipeline_read": Detail("device"),
    "pipeline_write": Detail("device"),
    "fast_init": NoEffect("states are made in the first step"),
    "ratio": NoEffect("all of the state is offloaded", (1, 1.0)),
    "super_offload": NoEffect("the step runs in host memory, while the next forward begins"),
    "cpuadam_cores_perc": NoEffect("OMP_NUM_THREADS says the number of threads", (0.8,)),
}

ZERO: Table = {
    "stage": Used("zero", PARSERS["zero"]),
    "contiguous_gradients": NoEffect("gradients of a block are always one buffer", (True,)),
    "reduce_scatter": NoEffect("gradients are averaged by reduce-scatter", (True,)),
    "reduce_bucket_size": NoEffect(SIZES, (500_000_000,)),
    "use_multi_rank_bucket_allreduce": NoEffect(SIZES, (True,)),
    "allgather_partitions": NoEffect("parameters are gathered by all-gather", (True,)),
    "allgather_bucket_size": NoEffect(SIZES, (500_000_000,)),
    "overlap_comm": NoEffect("communication overlaps computation where the device can", (True,)),
    "compute_grad_norm": NoEffect("clip_grad_norm_ computes the norm", (True,)),
    "load_from_fp32_weights": NoEffect(FILES, (True,)),
    "elastic_checkpoint": NoEffect(FILES),
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "zenflow": Refused("ZenFlow"),
    "sub_group_size": NoEffect("the optimizer steps over whole shards", (1_000_000_000,)),
    "cpu_offload": Used("optimizer_device", read.offloaded_to_host),
    "cpu_offload_params": Used("param_device", read.offloaded_to_host),
    "cpu_offload_param": Used("param_device", read.offloaded_to_host),
    "cpu_offload_use_pin_memory": NoEffect("memory is pinned where there is a GPU", (True,)),
    "gather_16bit_weights_on_model_save": NoEffect("save_model always writes whole weights", (True, False)),
    "stage3_gather_fp16_weights_on_model_save": NoEffect(
        "save_model always writes whole weights", (True, False)
    ),
    "ignore_unused_parameters": NoEffect("unused parameters are allowed", (True,)),
    "legacy_stage1": NoEffect("stage 1 has one implementation"),
    "round_robin_gradients": NoEffect("each rank holds its part of every parameter"),
    "parameter_alignment": NoEffect("torch's engine aligns its buffers", (False, True)),
    "zero_hpz_partition_size": Used("hpz", read.several),
    "zero_quantized_weights": Used("quantized_weights", read.int8),
    "zero_quantized_nontrainable_weights": Refused("frozen weights kept as integers"),
    "zero_quantized_gradients": Used("quantized_gradients", read.int8),
    "memory_efficient_linear": NoEffect("autograd of torch.nn.Linear is used", (True,)),
    "pipeline_loading_checkpoint": NoEffect(FILES),
    "override_module_apply": NoEffect("nn.Module.apply is left as it is", (True,)),
    "log_trace_cache_warnings": NoEffect("there is no trace of modules"),
    "enable_sanity_checks": NoEffect("ranks always compare their collectives"),
    "save_muon_momentum_buffer_in_memory": NoEffect("all of the optimizer's state is in one place"),
    "leaf_module": {
        key: NoEffect("blocks are found, or named with blocks=")
        for key in ("classes", "names", "name_suffixes")
    },
    "mics_shard_size": Refused(
        "MiCS",
        (-1,),
        "Remove it, and use parallel='zero=3 replicate=K' for K groups that each share a model.",
    ),
    "mics_hierarchical_params_gather": Refused(
        "MiCS",
        instead="Remove it, and use parallel='zero=3 hpz=K' to gather weights within groups of K ranks.",
    ),
    "zeropp_loco_param": Refused("error feedback (LoCo) for quantised gradients"),
}

# Stage 3 knobs go by two names, with the prefix and without.
ZERO_STAGE3: Table = {
    "prefetch_bucket_size": NoEffect(SIZES, (50_000_000,)),
    "param_persistence_threshold": NoEffect("small parameters are sharded too", (100_000,)),
    "model_persistence_threshold": NoEffect("small parameters are sharded too", (sys.maxsize,)),
    "max_live_parameters": NoEffect("one block, and the next one, are gathered at a time", (1_000_000_000,)),
    "max_reuse_distance": NoEffect("a block is freed after its use", (1_000_000_000,)),
    "gather_16bit_weights_on_model_save": NoEffect("save_model always writes whole weights", (True, False)),
    "module_granularity_threshold": NoEffect("blocks are found, or named with blocks=", (0,)),
    "use_all_reduce_for_fetch_params": NoEffect("parameters are gathered by all-gather"),
    "allgather_sequential": NoEffect(SIZES),
}

FP16: Table = {
    "enabled": Used("fp16", parse_bool),
    "auto_cast": NoEffect("autocast casts inputs where an operation needs it", (True, False)),
    "loss_scale": Used("loss_scale", read.positive),
    "initial_scale_power": Used("init_scale", read.power_of_two),
    "loss_scale_window": Used("growth_interval", read.SCALER_FIELDS["growth_interval"]),
    "hysteresis": NoEffect(SCALE, (2, 1)),
    "consecutive_hysteresis": NoEffect(SCALE),
    "min_loss_scale": NoEffect(SCALE, (1, 1.0, 0)),
    "fp16_master_weights_and_grads": Refused("master weights in fp16"),
    "opt_level": Refused("NVIDIA Apex", instead="Remove it: torch's autocast does what fp16 asks for."),
}

BF16: Table = {
    "enabled": Used("bf16", parse_bool),
    "immediate_grad_update": NoEffect("gradients accumulate in the type of their parameters", (True, False)),
    "check_grad_overflow": NoEffect("clip_grad_norm_ returns a norm that shows it", (True, False)),
    "bf16_master_weights_and_grads": Refused("master weights in bf16"),
    "bf16_optimizer_states": Refused("optimizer state in bf16"),
}

ACTIVATION: Table = {
    "cpu_checkpointing": Used("activation_offload", read.switch),
    "partition_activations": NoEffect("each rank has its own activations"),
    "contiguous_memory_optimization": NoEffect(RECOMPUTE),
    "number_checkpoints": NoEffect(RECOMPUTE),
    "synchronize_checkpoint_boundary": NoEffect(RECOMPUTE),
    "profile": NoEffect(TIMES),
}

DATA_TYPES: Table = {
    "grad_accum_dtype": NoEffect("gradients accumulate in the type of their parameters", ("fp32",)),
    "param_dtype": NoEffect("parameters keep the type that they were made with"),
    "buffer_dtype": NoEffect("buffers keep the type that they were made with"),
    "keep_in_fp32_modules": NoEffect("parameters and buffers keep the type that they were made with"),
}

CHECKPOINT: Table = {
    "tag_validation": NoEffect(FILES, ("warn", "ignore")),
    "load_universal": NoEffect(FILES),
    "use_node_local_storage": NoEffect("ProjectConfiguration(save_on_each_node=True) does this"),
    "parallel_write": {"pipeline_stage": NoEffect(FILES)},
    "checkpoint_serialization": NoEffect(FILES, (True, False)),
    "writer": NoEffect(FILES),
}

AIO: Table = {
    key: NoEffect(DISK, default)
    for key, default in {
        "block_size": (1_048_576,),
        "queue_depth": (8,),
        "thread_count": (1,),
        "intra_op_parallelism": (1,),
        "single_submit": (False,),
        "overlap_events": (True,),
        "use_gds": (False,),
    }.items()
}

COMPILE_KEYS = (
    "autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation",
    "offload_activation_pin_memory", "offload_opt_states", "double_buffer", "symmetric_memory", "debug_log",
    "offload_parameters", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather",
    "sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors",
)  # fmt: skip

HYBRID_KEYS = (
    "max_out_tokens", "inference_tp_size", "release_inference_cache", "pin_parameters",
    "tp_gather_partition_size", "enable_cuda_graph",
)  # fmt: skip

PROFILER_KEYS = (
    "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file",
)  # fmt: skip

COMET_KEYS = (
    "samples_log_interval", "project", "workspace", "api_key", "experiment_name", "experiment_key", "online", "mode",
)  # fmt: skip

LAYERS = "the layers to split come from the model's own plan or its structure; tp_plan= says others"
GROUPS = "a group of ranks made elsewhere"

# The older way to say the same, one level deeper.
TENSOR_GROUP: Table = {
    "tp_size": Used("tp", read.several),
    "tp_grain_size": NoEffect("every rank has an equal part of each layer", (1,)),
    "mpu": Refused(GROUPS),
    "tp_group": Refused(GROUPS),
}

TENSOR: Table = {
    "autotp_size": Used("tp", read.several),
    "tensor_parallel": TENSOR_GROUP,
    "tp": TENSOR_GROUP,
    "dtype": NoEffect("parameters keep the type that they were made with"),
    "tp_overlap_comm": NoEffect("layers are split and joined by torch's DTensor"),
    "injection_policy_tuple": NoEffect(LAYERS),
    "partition_config": NoEffect(LAYERS),
    "preset_model": NoEffect(LAYERS),
    "vocab_parallel_lm_head": NoEffect("loss_parallel keeps logits split over the vocabulary"),
    "vocab_parallel_ce_backend": Detail("vocab_parallel_lm_head"),
    "keep_module_on_host": NoEffect("a model is made as the script makes it"),
    "replace_with_kernel_inject": Refused("kernels for inference"),
    "kernel_inject": Refused("kernels for inference"),
}

KEYS: Table = {
    "train_batch_size": Used("train_batch_size", integer_between(1)),
    "train_micro_batch_size_per_gpu": same("micro_batch_size"),
    "gradient_accumulation_steps": same("gradient_accumulation_steps"),
    "managed_gradient_accumulation": NoEffect("accelerator.accumulate manages it", (True,)),
    "gradient_clipping": same("gradient_clipping"),
    "optimizer": same("optimizer"),
    "scheduler": same("scheduler"),
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "torch_autocast": {
        "enabled": Used("autocast", read.switch),
        "dtype": Used("autocast_dtype", read.dtype),
        "lower_precision_safe_modules": Refused("autocast for chosen modules"),
    },
    "zero_optimization": {
        **ZERO,
        **ZERO_STAGE3,
        **{f"stage3_{key}": rule for key, rule in ZERO_STAGE3.items()},
    },
    "zero_allow_untested_optimizer": NoEffect("any optimizer may be used", (True, False)),
    "zero_force_ds_cpu_optimizer": NoEffect(
        "torch's optimizers step on shards in host memory", (True, False)
    ),
    "activation_checkpointing": ACTIVATION,
    "communication_data_type": Used("reduce", read.dtype),
    "seq_parallel_communication_data_type": NoEffect(
        "the parts of a sequence are exchanged in the type of the computation", ("fp32",)
    ),
    "prescale_gradients": NoEffect(NUMERICS),
    "gradient_predivide_factor": NoEffect(NUMERICS, (1, 1.0)),
    "gradient_allreduce_op": Refused(
        "gradients that are summed over the ranks",
        ("mean",),
        "Remove it, and multiply the loss by the number of processes.",
    ),
    "disable_allgather": NoEffect("parameters are gathered by all-gather"),
    "sparse_gradients": Refused("sparse gradients of embeddings"),
    "data_types": DATA_TYPES,
    "checkpoint": CHECKPOINT,
    "aio": AIO,
    "dataloader_drop_last": NoEffect("the DataLoader's own drop_last counts"),
    "steps_per_print": NoEffect(PRINTS),
    "dump_state": NoEffect("lockstep launch --dry-run shows the settings"),
    "wall_clock_breakdown": NoEffect(TIMES),
    "memory_breakdown": NoEffect(TIMES),
    "log_level": NoEffect("Python's logging says the level"),
    "disable_python_gc": NoEffect("the script may call gc.disable()"),
    "vocabulary_size": NoEffect("it only checks for sizes that suit tensor cores"),
    "use_data_before_expert_parallelism": NoEffect("ep= places the ranks that share experts side by side"),
    "timers": {"throughput": {key: NoEffect(TIMES, (True, False)) for key in ("enabled", "synchronized")}},
    "flops_profiler": section(NoEffect(TIMES), *PROFILER_KEYS),
    "comms_logger": section(
        NoEffect("accelerator.communication() counts collectives"),
        "verbose",
        "prof_all",
        "debug",
        "prof_ops",
    ),
    "tensorboard": section(NoEffect(LOGS), "output_path", "job_name"),
    "csv_monitor": section(NoEffect(LOGS), "output_path", "job_name"),
    "wandb": section(NoEffect(LOGS), "group", "team", "project"),
    "comet": section(NoEffect(LOGS), *COMET_KEYS),
    "hybrid_engine": section(
        Refused(
            "the hybrid engine",
            instead="Remove it, and generate inside of accelerator.summon_full_params(model), "
            "which gathers all weights once.",
        ),
        *HYBRID_KEYS,
    ),
    "compile": {
        "enabled": NoEffect(COMPILE),
        "backend": NoEffect(COMPILE),
        "kwargs": NoEffect(COMPILE),
        "deepcompile": Refused("DeepCompile"),
        "passes": Refused("compiler passes of DeepSpeed"),
        **{key: Detail("deepcompile") for key in COMPILE_KEYS},
    },
    "sequence_parallel_size": Used("", read.ulysses),
    "data_parallel_size": NoEffect("lockstep launch says the number of processes"),
    "tensor_parallel": TENSOR,
    "expert_parallel": Refused(
        "expert parallelism of any model",
        instead="Remove it, and use parallel='ep=N' with layers of lockstep.nn.MixtureOfExperts.",
    ),
    "pipeline": Refused(
        "a pipeline whose micro-batches are those of gradient accumulation",
        instead="Remove it, and use parallel='pp=N micro_batches=M', which cuts each batch into micro-batches.",
    ),
    "amp": Refused("NVIDIA Apex", instead="Remove it, and use bf16 or fp16."),
    "msamp": Refused("MS-AMP", instead="Remove it, and train in 8 bits by mixed_precision='fp8'."),
    "autotuning": Refused(
        "DeepSpeed's autotuning",
        instead="Remove it, and let `lockstep tune` find the size of the micro-batch.",
    ),
    "elasticity": Refused(
        "batch sizes that follow the number of machines",
        instead="Remove it. With lockstep launch --nnodes MIN:MAX machines may leave and join.",
    ),
    "data_efficiency": Refused("data efficiency"),
    "curriculum_learning": Refused("curriculum learning"),
    "progressive_layer_drop": Refused("progressive layer dropping"),
    "eigenvalue": Refused("quantisation by eigenvalues"),
    "quantize_training": Refused("quantised training"),
    "weight_quantization": Refused("quantised weights"),
    "compression_training": Refused("compression"),
    "sparse_attention": Refused("sparse attention"),
    "graph_harvesting": Refused("graph harvesting"),
    "nebula": Refused("Nebula checkpoints"),
    "datastates_ckpt": Refused("DataStates checkpoints"),
}
