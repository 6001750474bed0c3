"""What an FSDP plugin asks for, in our settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.compat.fsdp.section import KEYS, WRAP_WORDS, from_fsdp
from lockstep.compat.rules import NoEffect, Table, Translation, Used, translate
from lockstep.config import readers as read
from lockstep.config.values import SettingValue
from lockstep.errors import ConfigError


def check_fsdp_plugin(plugin: object) -> Any:
    """Raise ConfigError unless ``plugin`` is None or has the fields of ``FullyShardedDataParallelPlugin``."""
    if plugin is not None and not hasattr(plugin, "sharding_strategy"):
        raise ConfigError(
            f"fsdp_plugin is of type {type(plugin).__name__}. Pass a FullyShardedDataParallelPlugin."
        )
    return plugin


FIELD_NAMES = {
    "fsdp_version": "version",
    "cpu_offload": "offload_params",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
}


def from_fsdp_plugin(plugin: object, machines: int = 1) -> Translation:
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
    extra |= {name: given for name, given in mixed.settings.items() if given.value}
    return Translation({**found.settings, **extra}, (*found.warnings, *mixed.warnings))


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


def _policy(policy: object) -> dict[str, object]:
    """Return a mixed precision policy, which may be a word, a mapping or torch's object, as a mapping of texts."""
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


def _offloads(value: object) -> object:
    """Return whether ``cpu_offload`` asks for it: a truth value, or one of torch's objects."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    return bool(getattr(value, "offload_params", type(value).__name__ == "CPUOffloadPolicy"))


def _plain(value: object) -> object:
    """Members of torch's enums by their names."""
    name = getattr(value, "name", None)
    return name if isinstance(name, str) and hasattr(value, "value") else value


def block_rule(policy: Callable[..., object]) -> Callable[[str, Any], bool]:
    """Return a wrap policy of ``torch.distributed.fsdp.wrap`` as a rule (name, module) -> bool."""

    def is_block(name: str, module: Any) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=size))

    return is_block
