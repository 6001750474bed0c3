"""The sections of Accelerate's YAML that spread a model, in our settings: DeepSpeed's and the layout of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep.config import readers as read
from lockstep.config.deepspeed import finish, from_deepspeed
from lockstep.config.rules import (
    Detail,
    NoEffect,
    Refused,
    Said,
    Table,
    Translation,
    Used,
    combine,
    translate,
)
from lockstep.errors import ConfigError

META = "a model is made as the script makes it; one made on the meta device is filled shard by shard"
ONE_COMMAND = "a launcher that reaches other machines; run the same command on each of them instead"

# Accelerate's own names, in its file and its plugin
DEEPSPEED_KEYS: Table = {
    "zero_stage": Used("zero", read.integer(0, 3)),
    "offload_optimizer_device": Used("offload", read.host_memory),
    "offload_param_device": Used("offload", read.host_memory),
    "offload_optimizer_nvme_path": Detail("offload_optimizer_device"),
    "offload_param_nvme_path": Detail("offload_param_device"),
    "gradient_accumulation_steps": Used("gradient_accumulation_steps", read.integer(1)),
    "gradient_clipping": Used("gradient_clipping", read.number),
    "zero3_init_flag": NoEffect(META),
    "zero3_save_16bit_model": NoEffect(
        "save_model always writes whole weights", (True, False, "true", "false")
    ),
    "transformer_moe_cls_names": NoEffect("experts are sharded as all other blocks are"),
    "deepspeed_moe_layer_cls_names": NoEffect("experts are sharded as all other blocks are"),
    "enable_msamp": Refused("fp8 training"),
    "deepspeed_multinode_launcher": Refused(ONE_COMMAND, ("standard",)),
    "deepspeed_hostfile": Refused(ONE_COMMAND),
    "deepspeed_inclusion_filter": Refused(ONE_COMMAND),
    "deepspeed_exclusion_filter": Refused(ONE_COMMAND),
}
FILE_KEY = "deepspeed_config_file"
DEFAULT_STAGE = 2


def from_deepspeed_section(section: Mapping[str, Any], where: str) -> Translation:
    """The section ``deepspeed_config``; the file that it names must agree with its other keys.

    Raises:
        ConfigError: a key is unknown or refused, or the file contradicts another key.
    """
    own = translate(DEEPSPEED_KEYS, {key: value for key, value in section.items() if key != FILE_KEY}, where)
    says, warnings = finish(own)
    path = section.get(FILE_KEY)
    if path in (None, "none", ""):
        says.setdefault("zero", Said(DEFAULT_STAGE, f"DeepSpeed's default, stage {DEFAULT_STAGE} ({where})"))
        return Translation(says, (*own.warnings, *warnings), own.rows)
    if not isinstance(path, str):
        raise ConfigError(f"{where}: {FILE_KEY} is not a path. Give the name of a JSON file.")
    combine(
        says, from_deepspeed(path).says
    )  # only to see whether they agree: workers read the file themselves
    says[FILE_KEY] = Said(path, f"{FILE_KEY}={path} ({where})")
    return Translation(says, (*own.warnings, *warnings), own.rows)


LAYOUT_PREFIX = "parallelism_config_"
LAYOUT_KEYS: Table = {
    "dp_replicate_size": Used("copies", read.integer(1)),
    "dp_shard_size": Used("shards", read.integer(1)),
    "tp_size": Used("tp", read.several),
    "cp_size": Used("cp", read.several),
    "sp_size": Used("ulysses", read.several),
    "cp_backend": Detail("cp_size"),
    "cp_comm_strategy": Detail("cp_size"),
    "cp_handler": Detail("cp_size"),
    "sp_backend": Detail("sp_size"),
    "sp_seq_length": Detail("sp_size"),
    "sp_seq_length_is_variable": Detail("sp_size"),
    "sp_attn_implementation": Detail("sp_size"),
    "sp_handler": Detail("sp_size"),
    "tp_handler": Detail("tp_size"),
}


def from_layout(section: Mapping[str, Any], where: str, alone: bool = True) -> Translation:
    """The section ``parallelism_config``: ``processes`` is the number of ranks that it describes.

    ``alone``: nothing else says a stage, so that its shards are those of stage 3.

    ``sp_size`` is context parallelism by all-to-all (Ulysses).

    Raises:
        ConfigError: a key is unknown, or the sequence is split in two ways.
    """
    table = {**LAYOUT_KEYS, **{LAYOUT_PREFIX + key: rule for key, rule in LAYOUT_KEYS.items()}}
    found = translate(table, section, where)
    copies, shards = found.says.get("copies"), found.says.get("shards")
    says: dict[str, Said] = {name: found.says[name] for name in ("tp", "cp") if name in found.says}
    ulysses = found.says.get("ulysses")
    if ulysses is not None:
        if "cp" in says:
            raise ConfigError(
                f"{says['cp'].source} and {ulysses.source} both split the sequence. Set one of them to 1."
            )
        says |= {"cp": ulysses, "cp_method": Said("ulysses", ulysses.source)}
    if shards is not None and shards.value > 1:
        if alone:
            says["zero"] = Said(3, shards.source)
        if copies is not None and copies.value > 1:
            says["replicate"] = copies
    sizes = [said for said in (copies, shards, says.get("cp"), says.get("tp")) if said is not None]
    size = math.prod(said.value for said in sizes)
    if size > 1:
        says["processes"] = Said(size, " x ".join(said.source for said in sizes))
    return Translation(says, found.warnings, found.rows)
