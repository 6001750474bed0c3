"""Accelerate's settings for FSDP, from its file, its variables or its plugin, in our settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.config import readers as read
from lockstep.config.rules import Detail, NoEffect, Refused, Table, Translation, Used, translate
from lockstep.config.values import SettingValue, parse_bool, shown
from lockstep.errors import ConfigError

PREFIX = "fsdp_"

# name of torch's ShardingStrategy -> stage of ZeRO, and whether only the ranks of one machine share a model
STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {"zero": 3},
    "shard_grad_op": {"zero": 2},
    "no_shard": {"zero": 0},
    "hybrid_shard": {"zero": 3, "hybrid": True},
    "hybrid_shard_zero2": {"zero": 2, "hybrid": True},
}
# _HYBRID_SHARD_ZERO2 is the name of torch's member; numbers are the values of the members
STRATEGY_WORDS = {
    **STRATEGIES,
    "_hybrid_shard_zero2": STRATEGIES["hybrid_shard_zero2"],
    **{str(number): says for number, says in enumerate(STRATEGIES.values(), 1)},
}

PREFETCH_WORDS = dict.fromkeys(("backward_pre", "backward_post", "no_prefetch", "1", "2", "3"))
STATE_WORDS = dict.fromkeys(("full_state_dict", "local_state_dict", "sharded_state_dict", "1", "2", "3"))
WRAP_WORDS = dict.fromkeys(("transformer_based_wrap", "size_based_wrap", "no_wrap"))

FILES = "save_model writes whole weights, and save_state what any number of processes can read"
STRUCTURE = "blocks are found by the model's structure, or named with blocks="


def _reshard(value: Any, key: str) -> dict[str, Any]:
    """True or False, as in FSDP 2, or a word of FSDP 1."""
    text = str(value).lower()
    if text in STRATEGY_WORDS and not text.isdigit():
        return STRATEGY_WORDS[text]
    try:
        return {"zero": 3 if parse_bool(value, key) else 2}
    except ConfigError:
        known = ", ".join(STRATEGIES)
        raise ConfigError(
            f"{key}={shown(value)} is not true, false or one of {known}. Use one of them."
        ) from None


KEYS: Table = {
    "version": NoEffect("both versions are torch's fully_shard", ("1", "2", 1, 2), read.integer(1, 2)),
    "sharding_strategy": Used("", read.word(STRATEGY_WORDS)),
    "reshard_after_forward": Used("", _reshard),
    "auto_wrap_policy": NoEffect(
        STRUCTURE, ("transformer_based_wrap",), lambda value, key: read.word(WRAP_WORDS)(value, key)
    ),
    "transformer_layer_cls_to_wrap": Used("blocks", read.names),
    "min_num_params": NoEffect(STRUCTURE, (0, "0", 100_000_000, "100000000", 1e8)),
    "backward_prefetch": NoEffect(
        "backward always gathers one block ahead", ("backward_pre", "1", 1), read.word(PREFETCH_WORDS)
    ),
    "forward_prefetch": Used("forward_prefetch", read.switch),
    "offload_params": Used("offload", read.offload_all),
    "state_dict_type": NoEffect(
        FILES, ("full_state_dict", "sharded_state_dict", "1", "3", 1, 3), read.word(STATE_WORDS)
    ),
    "state_dict_config": NoEffect(FILES),
    "optim_state_dict_config": NoEffect(FILES),
    "cpu_ram_efficient_loading": NoEffect(
        "every process loads what the script loads; build the model on the meta device instead"
    ),
    "sync_module_states": NoEffect("all ranks always begin with the weights of rank 0", (True, "true", "1")),
    "use_orig_params": NoEffect("the optimizer always sees the original parameters", (True, "true", "1")),
    "limit_all_gathers": NoEffect("torch's engine limits them", (True, "true", "1")),
    "activation_checkpointing": Used("checkpointing", read.truth),
    "activation_checkpointing_offload": Used("checkpointing_offload", read.switch),
    "ignored_modules": Refused("modules that are not sharded"),
    "param_init_fn": Refused(
        "a function that fills parameters made on the meta device",
        instead="Remove it, and call accelerator.prepare_model(model, init_weights=...).",
    ),
    "xla": Refused("XLA"),
    "xla_fsdp_v2": Refused("XLA"),
    "xla_fsdp_grad_ckpt": Refused("XLA"),
    "xla_fsdp_settings": Detail("xla"),
}


def from_fsdp(
    config: Any, where: str, machines: int = 1, prefix: str = PREFIX, table: Table | None = None
) -> Translation:
    """Translate the section ``fsdp_config``; the prefix of its keys may be left out.

    ``machines`` is the number of replicas of hybrid sharding.

    Raises:
        ConfigError: a key is unknown or refused, or two of them contradict each other.
    """
    known = table or {**KEYS, **{prefix + key: rule for key, rule in KEYS.items()}}
    found = translate(known, config, where)
    return Translation(finish(found.says, where, machines), found.warnings, found.rows)


def finish(found: Mapping[str, SettingValue], where: str, machines: int) -> dict[str, SettingValue]:
    """Settings that follow from several keys together; without a strategy it is FULL_SHARD."""
    says = dict(found)
    says.setdefault("zero", SettingValue(3, f"FULL_SHARD ({where})"))
    hybrid = says.pop("hybrid", None)
    if hybrid is not None and machines > 1:
        says["replicate"] = SettingValue(machines, f"{hybrid.source} on {machines} machines")
    checkpointing, offload = says.pop("checkpointing", None), says.pop("checkpointing_offload", None)
    if offload is not None:
        if checkpointing is None or not checkpointing.value:
            raise ConfigError(f"{offload.source} needs activation_checkpointing, which is off. Switch it on.")
        says["activation"] = SettingValue("offload", offload.source)
    elif checkpointing is not None and checkpointing.value:
        says["activation"] = SettingValue("full", checkpointing.source)
    return says


# -- the plugin ----------------------------------------------------------------------------------------

FIELD_NAMES = {
    "fsdp_version": "version",
    "cpu_offload": "offload_params",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
}


def from_fsdp_plugin(plugin: Any, machines: int = 1) -> Translation:
    """Translate an object with the fields of ``FullyShardedDataParallelPlugin``.

    Raises:
        ConfigError: as ``from_fsdp``.
    """
    fields = {name: value for name, value in vars(plugin).items() if not name.startswith("_")}
    policy = _policy(fields.pop("mixed_precision_policy", None))
    wrap = fields.get("auto_wrap_policy")
    rule = None
    if callable(wrap):
        word = getattr(wrap, "__name__", "").replace("_auto_wrap_policy", "_based_wrap")
        fields["auto_wrap_policy"] = word if word in WRAP_WORDS else None
        rule = None if word in WRAP_WORDS else block_rule(wrap)
    if "cpu_offload" in fields:
        fields["cpu_offload"] = _offloads(fields["cpu_offload"])
    config = {FIELD_NAMES.get(name, name): _plain(value) for name, value in fields.items()}
    where = "fsdp_plugin"
    found = from_fsdp(config, where, machines, table=KEYS)
    extra: dict[str, SettingValue] = {}
    if rule is not None:
        extra["blocks"] = SettingValue(rule, f"auto_wrap_policy ({where})")
    mixed = translate(POLICY_KEYS, policy, f"{where}.mixed_precision_policy")
    extra |= {name: said for name, said in mixed.says.items() if said.value}
    return Translation({**found.says, **extra}, (*found.warnings, *mixed.warnings), found.rows)


POLICY_KEYS: Table = {
    "param_dtype": Used(
        "", lambda value, key: {name: True for name in [read.dtype(value, key)] if name != "fp32"}
    ),
    "reduce_dtype": Used("reduce", read.dtype),
    "buffer_dtype": NoEffect("buffers keep their type", ("torch.float32", "fp32", "float32")),
    "output_dtype": NoEffect("outputs of prepared models are fp32", ("torch.float32", "fp32", "float32")),
    "keep_low_precision_grads": NoEffect("gradients have the type of their parameters"),
    "cast_forward_inputs": NoEffect("autocast casts inputs", (True,)),
    "cast_root_forward_inputs": NoEffect("autocast casts inputs", (True,)),
    "_module_classes_to_ignore": NoEffect("autocast keeps normalisation in fp32"),
}
POLICY_FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")


def _policy(policy: Any) -> dict[str, Any]:
    """A mixed precision policy, which may be a word, a mapping or torch's object, as a mapping of texts."""
    if policy is None:
        return {}
    if isinstance(policy, str):
        return {"param_dtype": policy, "reduce_dtype": policy}
    if not isinstance(policy, Mapping):
        policy = {name: getattr(policy, name, None) for name in POLICY_FIELDS}
    return {
        name: value if value is None or isinstance(value, bool) else str(value)
        for name, value in policy.items()
    }


def _offloads(value: Any) -> Any:
    """``cpu_offload`` may be a truth value, or one of torch's objects that ask for it."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    return bool(getattr(value, "offload_params", type(value).__name__ == "CPUOffloadPolicy"))


def _plain(value: Any) -> Any:
    """Members of torch's enums by their names."""
    name = getattr(value, "name", None)
    return name if isinstance(name, str) and hasattr(value, "value") else value


def block_rule(policy: Callable[..., Any]) -> Callable[[str, Any], bool]:
    """A wrap policy of ``torch.distributed.fsdp.wrap`` as a rule (name, module) -> bool."""

    def is_block(name: str, module: Any) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=size))

    return is_block
