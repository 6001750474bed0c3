"""Writing a configuration file that :func:`lockstep.compat.accelerate.config_file.load` reads back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from lockstep.compat.accelerate.config_file import ONLY_IN_ACCELERATE, from_yaml
from lockstep.compat.accelerate.sections import LAYOUT_PREFIX
from lockstep.compat.fsdp.section import PREFIX, STRATEGY_WORDS
from lockstep.config.parallel import Parallel
from lockstep.config.values import FALSE_WORDS
from lockstep.config.world import BatchSizes, fitted
from lockstep.config.yaml_file import YamlFile
from lockstep.errors import ConfigError


def write_config(path: Path, answers: Mapping[str, object]) -> None:
    """Check the answers as a file would be checked, then write them.

    Raises:
        ConfigError: an answer is not valid, or the file cannot be written.
    """
    config = from_yaml(YamlFile(str(path), dict(answers))).config
    if config.parallel is not None and config.num_processes is not None:
        fitted(Parallel.parse(config.parallel), BatchSizes(), config.num_processes)
    settings = config.model_dump(mode="json", exclude_unset=True)
    write_text(path, "# For `lockstep launch`; every key is also one of its flags.\n" + as_yaml(settings))


def as_yaml(settings: Mapping[str, object]) -> str:
    """Settings as lines of YAML, in their order."""
    return yaml.safe_dump(dict(settings), sort_keys=False)


def write_text(path: Path, text: str) -> None:
    """Write a file, and the folders above it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be written: {reason}. Name another file.") from None


# keys that FSDP 2 has no longer -> what it does instead
_GONE = {
    "backward_prefetch": "one block is always gathered ahead",
    "forward_prefetch": "torch's engine decides it",
    "sync_module_states": "all ranks always begin with the weights of rank 0",
    "use_orig_params": "the optimizer always sees the original parameters",
}


def converted_to_fsdp2(file: YamlFile) -> tuple[str, list[str]]:
    """The text of Accelerate's file with its section ``fsdp_config`` in the words of FSDP 2, and what changed by that.

    Raises:
        ConfigError: the file is not valid, has no such section, or asks for what FSDP 2 does not do.
    """
    from_yaml(file)
    section = file.data.get("fsdp_config")
    if not isinstance(section, dict) or not section:
        raise ConfigError(
            f"{file.name} has no section fsdp_config, so there is nothing to convert. Name another file."
        )
    old = {key.removeprefix(PREFIX): value for key, value in section.items()}
    if str(old.get("version", 1)) == "2":
        return yaml.safe_dump(dict(file.data)), [f"{file.name} is for FSDP 2 already: nothing changed."]
    word = str(old.pop("sharding_strategy", None) or old.get("reshard_after_forward") or "FULL_SHARD").lower()
    asked = STRATEGY_WORDS.get(word, {"zero": 2 if word in FALSE_WORDS else 3})
    if asked["zero"] == 0:
        raise ConfigError(
            f"{file.at('fsdp_config')}: NO_SHARD replicates the model, which FSDP 2 does not. Set distributed_type: "
            "MULTI_GPU, and remove fsdp_config."
        )
    # With the prefix, or without it as they are written.
    names = {key: PREFIX + key for key in ("version", "reshard_after_forward", "state_dict_type")}
    names |= {key.removeprefix(PREFIX): key for key in section}
    new = {names[key]: value for key, value in old.items() if key not in _GONE}
    new |= {names["version"]: 2, names["reshard_after_forward"]: asked["zero"] == 3}
    notes = [f"{PREFIX}{key} was removed: {why}." for key, why in _GONE.items() if key in old]
    if str(old.get("state_dict_type", "")).upper() == "LOCAL_STATE_DICT":
        new[names["state_dict_type"]] = "SHARDED_STATE_DICT"
        notes.append("LOCAL_STATE_DICT became SHARDED_STATE_DICT: FSDP 2 has no other shards.")
    data = {**file.data, "fsdp_config": new}
    machines, processes = (int(file.data.get(key) or 1) for key in ("num_machines", "num_processes"))
    if asked.get("hybrid") and machines > 1:
        sizes = {"dp_replicate_size": machines, "dp_shard_size": processes // machines}
        data["parallelism_config"] = {LAYOUT_PREFIX + key: size for key, size in sizes.items()}
        notes.append(
            f"{word.upper()} became parallelism_config: each of the {machines} machines shards one replica."
        )
    return yaml.safe_dump(data), notes


# What `accelerate config` writes into each file, where nothing else was asked and another key cannot say it.
_EVERYWHERE: dict[str, object] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "enable_cpu_affinity": False,
    "main_training_function": "main",
    "num_machines": 1,
    "same_network": True,
    "use_cpu": False,
}


def updated(file: YamlFile) -> tuple[str, list[str]]:
    """The text of a file in today's form, and what was changed for that. It means the same as before.

    Raises:
        ConfigError: the file is not valid.
    """
    data, changes = dict(file.data), []
    backend = data.pop("dynamo_backend", None) if any(key in data for key in ONLY_IN_ACCELERATE) else None
    if backend is not None:
        section = {} if str(backend).upper() in ("NO", "FALSE") else {"dynamo_backend": backend}
        data["dynamo_config"] = section | (data.get("dynamo_config") or {})
        changes.append("dynamo_backend is in dynamo_config now")
    if any(key in data for key in ONLY_IN_ACCELERATE):
        given = from_yaml(file).config.given()
        missing = {key: value for key, value in _EVERYWHERE.items() if key not in data}
        missing |= {key: given[key] for key in missing if key in given}
        data |= missing
        changes += [f"{key} was added" for key in missing]
    before, after = from_yaml(file).config, from_yaml(YamlFile(file.name, data)).config
    changed = {**_EVERYWHERE, **before.given()} != {**_EVERYWHERE, **after.given()}
    assert not changed, "an update changes no setting"
    return yaml.safe_dump(data), changes
