"""Accelerate's settings for FSDP, from its file, its variables or its plugin, in our settings."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.compat.rules import Detail, NoEffect, Refused, Table, Translation, Used, translate
from lockstep.config import readers as read
from lockstep.config.values import SettingValue, integer_between, parse_bool, repr_short
from lockstep.errors import ConfigError

PREFIX = "fsdp_"

# name of torch's ShardingStrategy -> stage of ZeRO, and whether only the ranks of one machine share a model
STRATEGIES: dict[str, dict[str, object]] = {
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
    **{str(number): asked for number, asked in enumerate(STRATEGIES.values(), 1)},
}

PREFETCH_WORDS = dict.fromkeys(("backward_pre", "backward_post", "no_prefetch", "1", "2", "3"))
STATE_WORDS = dict.fromkeys(("full_state_dict", "local_state_dict", "sharded_state_dict", "1", "2", "3"))
WRAP_WORDS = dict.fromkeys(("transformer_based_wrap", "size_based_wrap", "no_wrap"))

FILES = "save_model writes whole weights, and save_state what any number of processes can read"
STRUCTURE = "blocks are found by the model's structure, or named with blocks="


def _reshard(value: object, key: str) -> dict[str, object]:
    """Read true or false, as in FSDP 2, or a word of FSDP 1."""
    text = str(value).lower()
    if text in STRATEGY_WORDS and not text.isdigit():
        return STRATEGY_WORDS[text]
    try:
        return {"zero": 3 if parse_bool(value, key) else 2}
    except ConfigError:
        known = ", ".join(STRATEGIES)
        raise ConfigError(
            f"{key}={repr_short(value)} must be true, false or one of {known}. Use one of them."
        ) from None


PREFETCH = NoEffect(
    "backward always gathers one block ahead", ("backward_pre", "1", 1), read.word(PREFETCH_WORDS)
)
KEYS: Table = {
    "version": NoEffect("both versions are torch's fully_shard", ("1", "2", 1, 2), integer_between(1, 2)),
    "sharding_strategy": Used("", read.word(STRATEGY_WORDS)),
    "reshard_after_forward": Used("", _reshard),
    "auto_wrap_policy": NoEffect(
        STRUCTURE, ("transformer_based_wrap",), lambda value, key: read.word(WRAP_WORDS)(value, key)
    ),
    "transformer_layer_cls_to_wrap": Used("blocks", read.names),
    "min_num_params": NoEffect(STRUCTURE, (0, "0", 100_000_000, "100000000", 1e8)),
    "backward_prefetch": PREFETCH,
    # As older files, and Accelerate's guide, name it.
    "backward_prefetch_policy": PREFETCH,
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
    "activation_checkpointing": Used("checkpointing", parse_bool),
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
    config: object, where: str, machines: int = 1, prefix: str = PREFIX, table: Table | None = None
) -> Translation:
    """Translate the section ``fsdp_config``; the prefix of its keys may be left out.

    ``machines`` is the number of replicas of hybrid sharding.

    Raises:
        ConfigError: a key is unknown or refused, or two of them contradict each other.
    """
    known = table or {**KEYS, **{prefix + key: rule for key, rule in KEYS.items()}}
    found = translate(known, config, where)
    return Translation(finish(found.settings, where, machines), found.warnings)


def finish(found: Mapping[str, SettingValue], where: str, machines: int) -> dict[str, SettingValue]:
    """Return settings that follow from several keys together; without a strategy it is FULL_SHARD."""
    asked = dict(found)
    asked.setdefault("zero", SettingValue(3, f"FULL_SHARD ({where})"))
    hybrid = asked.pop("hybrid", None)
    if hybrid is not None and machines > 1:
        asked["replicate"] = SettingValue(machines, f"{hybrid.source} on {machines} machines")
    checkpointing, offload = asked.pop("checkpointing", None), asked.pop("checkpointing_offload", None)
    if offload is not None:
        if checkpointing is None or not checkpointing.value:
            raise ConfigError(f"{offload.source} needs activation_checkpointing, which is off. Switch it on.")
        asked["activation"] = SettingValue("offload", offload.source)
    elif checkpointing is not None and checkpointing.value:
        asked["activation"] = SettingValue("full", checkpointing.source)
    return asked
