"""The smaller sections of Accelerate's YAML in our settings: the layout of ranks, mpirun, and ``torch.compile``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from lockstep.compat.deepspeed.yaml_section import file_name, from_deepspeed_section
from lockstep.compat.fsdp.section import from_fsdp
from lockstep.compat.rules import Detail, NoEffect, Refused, Table, Translation, Used, same, translate
from lockstep.config import readers as read
from lockstep.config.settings import SETTINGS
from lockstep.config.values import SettingValue, integer_between, parse_bool
from lockstep.errors import ConfigError

MPI_SECTION = "mpirun_config"
MPI_KEYS: Table = {
    "mpirun_hostfile": Used("hostfile", file_name),
    "mpirun_ccl": NoEffect(
        "only oneCCL reads it; export CCL_WORKER_COUNT and forward that variable", ("1", 1)
    ),
}


def from_mpirun(section: Mapping[str, object], where: str) -> Translation:
    """Translate the section ``mpirun_config``: mpirun starts the processes, on the hosts of a file.

    Raises:
        ConfigError: a key is unknown, or has a value that is not allowed.
    """
    found = translate(MPI_KEYS, section, where)
    if "hostfile" not in found.settings:
        return found
    return Translation({**found.settings, "mpi": SettingValue(True, where)}, found.warnings)


DYNAMO_SECTION, DYNAMO_PREFIX = "dynamo_config", "dynamo_"
DYNAMO_KEYS: Table = {
    key.removeprefix(DYNAMO_PREFIX): Used(key, SETTINGS[key].kind.for_worker)
    for key in SETTINGS
    if key.startswith(DYNAMO_PREFIX)
}


def from_dynamo(section: Mapping[str, object], where: str) -> Translation:
    """Translate the section ``dynamo_config``: how ``torch.compile`` compiles; the prefix of its keys may be left out.

    Raises:
        ConfigError: a key is unknown, or has a value that is not allowed.
    """
    table = {**DYNAMO_KEYS, **{DYNAMO_PREFIX + key: rule for key, rule in DYNAMO_KEYS.items()}}
    return translate(table, section, where)


FP8_SECTION, FP8_PREFIX = "fp8_config", "fp8_"
OF_TE, OF_MSAMP = "a setting of TransformerEngine", "a setting of MS-AMP"
FP8_KEYS: Table = {
    "backend": Refused("fp8 by another package than torchao", ("ao", "torchao", "no"), "Say AO."),
    "pad_inner_dim": same("fp8_pad_inner_dim"),
    "enable_fsdp_float8_all_gather": NoEffect(
        "sharded weights are gathered in bfloat16, and cast then", read=parse_bool
    ),
    "use_autocast_during_eval": Refused(OF_TE),
    "margin": Refused(OF_TE, (0, "0")),
    "interval": Refused(OF_TE, (1, "1")),
    "format": Refused(OF_TE, ("hybrid",)),
    "amax_history_len": Refused(OF_TE, (1024, "1024")),
    "amax_history_length": Refused(OF_TE, (1024, "1024")),
    "amax_compute_algo": Refused(OF_TE, ("most_recent",)),
    "amax_compute_algorithm": Refused(OF_TE, ("most_recent",)),
    "override_linear_precision": Refused(OF_TE, ([False] * 3, "false,false,false")),
    "opt_level": Refused(OF_MSAMP, ("o2",)),
    "optimization_level": Refused(OF_MSAMP, ("o2",)),
}


def from_fp8(section: Mapping[str, object], where: str) -> Translation:
    """Translate the section ``fp8_config``, how linear layers compute in 8 bits; its keys may lack their prefix.

    Raises:
        ConfigError: a key is unknown, or asks for another package than torchao.
    """
    table = {**FP8_KEYS, **{FP8_PREFIX + key: rule for key, rule in FP8_KEYS.items()}}
    return translate(table, section, where)


LAYOUT_PREFIX = "parallelism_config_"
LAYOUT_KEYS: Table = {
    "dp_replicate_size": Used("copies", integer_between(1)),
    "dp_shard_size": Used("shards", integer_between(1)),
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


def from_layout(section: Mapping[str, object], where: str, alone: bool = True) -> Translation:
    """Translate the section ``parallelism_config``: ``processes`` is the number of ranks that it describes.

    ``alone``: nothing else says a stage, so that its shards are those of stage 3.

    ``sp_size`` is context parallelism by all-to-all (Ulysses).

    Raises:
        ConfigError: a key is unknown, or the sequence is split in two ways.
    """
    table = {**LAYOUT_KEYS, **{LAYOUT_PREFIX + key: rule for key, rule in LAYOUT_KEYS.items()}}
    found = translate(table, section, where)
    copies, shards = found.settings.get("copies"), found.settings.get("shards")
    settings: dict[str, SettingValue] = {
        name: found.settings[name] for name in ("tp", "cp") if name in found.settings
    }
    ulysses = found.settings.get("ulysses")
    if ulysses is not None:
        if "cp" in settings:
            raise ConfigError(
                f"{settings['cp'].source} and {ulysses.source} both split the sequence, but only one can. Set "
                "one of them to 1."
            )
        settings |= {"cp": ulysses, "cp_method": SettingValue("ulysses", ulysses.source)}
    if shards is not None and shards.value > 1:
        if alone:
            settings["zero"] = SettingValue(3, shards.source)
        if copies is not None and copies.value > 1:
            settings["replicate"] = copies
    sizes = [
        degree for degree in (copies, shards, settings.get("cp"), settings.get("tp")) if degree is not None
    ]
    size = math.prod(degree.value for degree in sizes)
    if size > 1:
        settings["processes"] = SettingValue(size, " x ".join(degree.source for degree in sizes))
    return Translation(settings, found.warnings)


def read_section(
    key: str, section: Mapping[str, object], where: str, machines: int = 1, alone: bool = True
) -> Translation:
    """Translate the section ``key`` of Accelerate's file. ``alone``: no other one shards models.

    Raises:
        ConfigError: a key is unknown or refused, or has a value that is not allowed.
    """
    if key == "fsdp_config":
        return from_fsdp(section, where, machines)
    if key == "parallelism_config":
        return from_layout(section, where, alone)
    return _READERS[key](section, where)


_READERS: dict[str, Callable[[Mapping[str, object], str], Translation]] = {
    "deepspeed_config": from_deepspeed_section,
    MPI_SECTION: from_mpirun,
    DYNAMO_SECTION: from_dynamo,
    FP8_SECTION: from_fp8,
}
