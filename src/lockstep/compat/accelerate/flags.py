"""The options of ``accelerate launch`` for sharding and for mpirun, from the tables that also read its file."""

from __future__ import annotations

from lockstep.compat.accelerate import sections
from lockstep.compat.deepspeed import yaml_section as deepspeed
from lockstep.compat.fsdp import section as fsdp
from lockstep.compat.rules import Translation, is_off
from lockstep.config.merge import (
    joined_sources,
    merge_settings,
    parallel_of,
    parallel_sources,
    values_of_settings,
)
from lockstep.config.settings import SETTINGS
from lockstep.config.values import SettingValue
from lockstep.errors import ConfigError

FSDP_FLAGS = tuple(fsdp.PREFIX + key for key in fsdp.KEYS)
DEEPSPEED_FLAGS = tuple(key for key in deepspeed.DEEPSPEED_KEYS if key not in SETTINGS)
LAYOUT_FLAGS = tuple(sections.LAYOUT_PREFIX + key for key in sections.LAYOUT_KEYS)
MPI_FLAGS = tuple(sections.MPI_KEYS)
FP8_FLAGS = ("fp8_backend", "fp8_pad_inner_dim", "fp8_enable_fsdp_float8_all_gather")
FOREIGN_FLAGS = (*FSDP_FLAGS, *DEEPSPEED_FLAGS, *LAYOUT_FLAGS, *MPI_FLAGS, *FP8_FLAGS)
# Section of Accelerate's file -> its flags, the switch that asks for it alone, and how messages call them.
_SECTIONS = {
    "fsdp_config": (FSDP_FLAGS, "use_fsdp", "flags --fsdp-*"),
    "deepspeed_config": (DEEPSPEED_FLAGS, "use_deepspeed", "flags of DeepSpeed"),
    "parallelism_config": (LAYOUT_FLAGS, "", "flags --parallelism-config-*"),
    sections.MPI_SECTION: (MPI_FLAGS, "", "flags --mpirun-*"),
    sections.FP8_SECTION: (FP8_FLAGS, "", "flags --fp8-*"),
}
FOREIGN_SWITCHES = ("use_fsdp", "use_deepspeed", "use_parallelism_config")
# Switches of accelerate launch, torchrun, torch.distributed.launch and deepspeed that ask for what is so here anyway.
UNUSED_SWITCHES = ("same_network", "no_tpu_cluster", "standalone", "use_env", "no_local_rank")
# The same with a value.
UNUSED_FLAGS = ("rdzv_id", "start_method")

# What else is refused by name, unless it asks for nothing: (feature, what to do) -> options, with their defaults.
_REFUSED: dict[tuple[str, str], str] = {
    ("Megatron-LM settings", "Use --parallel, such as 'tp=2 pp=2', in its place."): """
        megatron_lm_tp_degree=1 megatron_lm_pp_degree=1 megatron_lm_gradient_clipping=1.0 megatron_lm_use_custom_fsdp
        megatron_lm_no_load_optim megatron_lm_eod_mask_loss megatron_lm_overlap_cpu_optimizer_d2h_h2d
        megatron_lm_no_save_optim megatron_lm_optimizer_cpu_offload megatron_lm_use_precision_aware_optimizer
        megatron_lm_decoder_last_pipeline_num_layers megatron_lm_num_micro_batches megatron_lm_sequence_parallelism
        megatron_lm_recompute_activations megatron_lm_use_distributed_optimizer megatron_lm_recompute_granularity
        megatron_lm_recompute_method megatron_lm_recompute_num_layers megatron_lm_attention_backend
        megatron_lm_expert_model_parallel_size=1 megatron_lm_context_parallel_size=1 megatron_lm_attention_dropout
        megatron_lm_hidden_dropout megatron_lm_attention_softmax_in_fp32 megatron_lm_expert_tensor_parallel_size=1
        megatron_lm_calculate_per_token_loss megatron_lm_use_rotary_position_embeddings use_megatron_lm
    """,
    ("fp8 by another package than torchao", "Drop it: --mixed-precision fp8 is enough."): """
        fp8_use_autocast_during_eval fp8_margin=0 fp8_interval=1 fp8_format=hybrid fp8_amax_history_len=1024
        fp8_amax_compute_algo=most_recent fp8_override_linear_precision=false,false,false fp8_opt_level=o2
    """,
    ("training on TPUs", "Drop it."): """
        tpu tpu_cluster tpu_use_sudo vm env main_training_function=main downcast_bf16
    """,
    ("DeepSpeed's choice of machines and GPUs", "Use --hosts, --hostfile or --gpu-ids."): """
        include exclude
    """,
    ("a launcher of DeepSpeed", "Use --hosts, --slurm or --mpi."): "launcher",
    ("DeepSpeed's autotuning", "Use `lockstep tune`."): "autotuning",
    ("cores for each process", "Use --num-cpu-threads or --enable-cpu-affinity."): """
        bind_cores_to_rank bind_core_list
    """,
    ("Amazon SageMaker", "Drop it, and start the script on each machine."): """
        aws_access_key_id aws_secret_access_key
    """,
}
REFUSED = {
    name: (what, instead, default)
    for (what, instead), text in _REFUSED.items()
    for name, _, default in (word.partition("=") for word in text.split())
}
"""Name -> what it asks for, what to do, and the value that asks for nothing."""
REFUSED_SWITCHES = (
    "fp8_use_autocast_during_eval",
    "use_megatron_lm",
    "tpu",
    "tpu_cluster",
    "tpu_use_sudo",
    "downcast_bf16",
    "bind_cores_to_rank",
)
"""Of these the ones without a value."""


def check_refused(options: dict[str, object]) -> None:
    """Raise ConfigError where one of these options asks for something; its value, perhaps a key, is not shown."""
    for name, (what, instead, default) in REFUSED.items():
        value = options[name]
        if is_off(value) or (default and str(value).lower() == default):
            continue
        raise ConfigError(f"--{name.replace('_', '-')} asks for {what}, which is not available. {instead}")


def spread_settings(
    given: dict[str, SettingValue], options: dict[str, object]
) -> tuple[dict[str, SettingValue], tuple[str, ...]]:
    """Return the settings that these options mean, and warnings; ``given`` are the other flags.

    Raises:
        ConfigError: a value is not allowed, or flags contradict each other.
    """
    machines = given["num_machines"].value if "num_machines" in given else 1
    parts: list[Translation] = []
    for key, (flags, switch, where) in _SECTIONS.items():
        section = {name: options[name] for name in flags if options[name] is not None}
        if section or options.get(switch):
            if key == "deepspeed_config":
                section[deepspeed.FILE_KEY] = options[deepspeed.FILE_KEY]
            parts.append(sections.read_section(key, section, where, machines, alone=not parts))
    if not parts:
        return {}, ()
    asked = merge_settings(*(part.settings for part in parts), _given_by_flags(given, machines))
    names = {"num_processes": "processes"} | {name: name for name in asked if name in SETTINGS}
    settings = {
        name: SettingValue(asked[own].value, asked[own].source)
        for name, own in names.items()
        if own in asked and name not in given and not (name == "num_processes" and "nproc" in given)
    }
    words = parallel_sources(asked)
    if words:
        settings["parallel"] = SettingValue(str(parallel_of(asked)), joined_sources(words), words)
    return settings, tuple(text for part in parts for text in part.warnings)


def _given_by_flags(given: dict[str, SettingValue], machines: int) -> dict[str, SettingValue]:
    asked = values_of_settings({name: (setting.value, setting.source) for name, setting in given.items()})
    for name, factor in (("num_processes", 1), ("nproc", machines)):
        if name in given:
            total = given[name].value * factor
            asked["processes"] = SettingValue(total, f"{total} processes ({given[name].source})")
    return asked
