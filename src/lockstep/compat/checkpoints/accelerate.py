"""A folder of Accelerate's ``save_state``: plain, with FSDP, or around a DeepSpeed checkpoint.

A folder ``checkpoint-N`` of transformers' Trainer, which TRL's trainers write too, has the same objects under other
names (seen with transformers 5.24).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from lockstep.compat.checkpoints.dcp import METADATA, read_dcp
from lockstep.compat.checkpoints.deepspeed import read_deepspeed, tag_folder
from lockstep.compat.checkpoints.reader import ForeignReader
from lockstep.compat.checkpoints.roles import is_weights, optimizer
from lockstep.compat.checkpoints.source import CheckpointSource
from lockstep.compat.checkpoints.state import ImportedState, generator_states, require_plain
from lockstep.config.files import parse_json
from lockstep.errors import CheckpointError

_RNG = r"random_states_(\d+)\.pkl"
_TRAINER_RNG = r"rng_state(?:_(\d+))?\.pth"
_TRAINER_STATE = "trainer_state.json"
_OPTIMIZER, _SCHEDULER = r"optimizer(_\d+)?\.(?:bin|pt)", r"scheduler(_\d+)?\.(?:bin|pt)"
_OBJECTS = r"custom_checkpoint_(\d+)\.pkl"
_SIGNS = (
    _RNG,
    _OBJECTS,
    r"optimizer(_\d+)?\.bin",
    r"scheduler(_\d+)?\.bin",
    re.escape(_TRAINER_STATE),
    r"pytorch_model_fsdp(_\d+)?\.bin",
)
_FSDP_FOLDER = r"(pytorch_model_fsdp|optimizer)_\d+/\.metadata"


def is_accelerate(source: CheckpointSource) -> bool:
    """Return whether a folder has files that only Accelerate or the Trainer names so."""
    return any(source.matching(pattern) for pattern in (*_SIGNS, _FSDP_FOLDER))


def read_accelerate(reader: ForeignReader) -> ImportedState:
    """Return the state that ``save_state`` wrote.

    Raises:
        CheckpointError: a part is missing, refused or of a form that is not read.
    """
    source = reader.source
    used: set[str] = set()
    layout = "transformers' Trainer" if _TRAINER_STATE in source else "Accelerate"
    state = ImportedState(layout)
    deepspeed = tag_folder(reader)
    deepspeed = deepspeed if deepspeed is not None else tag_folder(reader, "pytorch_model")
    if deepspeed is not None:
        state = read_deepspeed(reader, deepspeed)
        state.layout = f"{layout} with DeepSpeed"
        used |= {name for name in source.names if name.startswith(f"{deepspeed}/") or name == "latest"}
    else:
        used |= _read_models(reader, state) | _read_optimizers(reader, state)
    for read in (_read_schedulers, _read_scaler, _read_objects, _read_generators, _read_step):
        used |= read(reader, state)
    left = [name for name in source.names if name not in used]
    state.notes += [f"{name}: left out, because {_why_left(name)}" for name in left]
    state.notes += [f"{name}: left out, because skip names it" for name in source.skipped]
    if not state.models:
        raise CheckpointError(
            f"{source.path} has no weights: neither model.safetensors, pytorch_model.bin, pytorch_model_fsdp.bin "
            f"nor pytorch_model_fsdp_0/, only {source.names[:5]}. Copy the whole folder."
        )
    return state


def _why_left(name: str) -> str:
    is_loader = re.fullmatch(r"(dl_state_dict|sampler)(_\d+)?\.bin", name)
    return (
        "only its own library can read where a loader is"
        if is_loader
        else "it is no part of a training state"
    )


def _dcp_folders(source: CheckpointSource, stem: str) -> list[str]:
    found = source.matching(rf"({stem}_\d+)/{re.escape(METADATA)}")
    return sorted((groups[0] for groups in found), key=lambda name: int(name.rsplit("_", 1)[1]))


def _read_models(reader: ForeignReader, state: ImportedState) -> set[str]:
    source = reader.source
    by_rank = source.matching(r"(pytorch_model_fsdp(?:_\d+)?_rank\d+\.bin)")
    if by_rank:
        raise CheckpointError(
            f"{reader.path(next(iter(by_rank.values())))} is one rank's shard, and no file says how the shards "
            "belong together. Save with SHARDED_STATE_DICT, or with FULL_STATE_DICT."
        )
    # save_state writes one of these kinds for all models; safetensors go before pickles.
    files = source.numbered(r"model(_\d+)?\.safetensors") or source.numbered(r"pytorch_model(_\d+)?\.bin")
    files = files or source.numbered(r"pytorch_model_fsdp(_\d+)?\.bin")
    for name in files:
        value = reader.read_safetensors(name) if name.endswith(".safetensors") else reader.read(name)
        _add_model(reader, state, name, value)
    folders = [] if files else _dcp_folders(source, "pytorch_model_fsdp")
    for folder in folders:
        value = read_dcp(reader, folder)
        _add_model(reader, state, folder, value.get("model"))
    return set(files) | _inside(source, folders)


def _add_model(reader: ForeignReader, state: ImportedState, name: str, value: Any) -> None:
    if not is_weights(value):
        raise reader.broken(name, "it is not a dict of tensors")
    state.models.append(value)
    state.notes.append(f"{name}: weights of model {len(state.models) - 1}")


def _read_optimizers(reader: ForeignReader, state: ImportedState) -> set[str]:
    files = reader.source.numbered(_OPTIMIZER)
    folders = [] if files else _dcp_folders(reader.source, "optimizer")
    saved = reader.read_all(files) or [read_dcp(reader, folder).get("optimizer") for folder in folders]
    for name, value in zip(files or folders, saved, strict=True):
        state.optimizers.append(optimizer(value, name))
        state.notes.append(f"{name}: state of optimizer {len(state.optimizers) - 1}")
    return set(files) | _inside(reader.source, folders)


def _inside(source: CheckpointSource, folders: list[str]) -> set[str]:
    return {name for name in source.names if name.split("/")[0] in folders}


def _read_schedulers(reader: ForeignReader, state: ImportedState) -> set[str]:
    files = reader.source.numbered(_SCHEDULER)
    # DeepSpeed's file has a copy of the same object.
    if files and state.schedulers:
        state.notes += [f"{name}: left out, because DeepSpeed's file has the scheduler too" for name in files]
        return set(files)
    for name, value in zip(files, reader.read_all(files), strict=True):
        state.schedulers.append(_plain_dict(reader, name, value))
        state.notes.append(f"{name}: state of scheduler {len(state.schedulers) - 1}")
    return set(files)


def _read_scaler(reader: ForeignReader, state: ImportedState) -> set[str]:
    if "scaler.pt" not in reader.source:
        return set()
    state.scaler = _plain_dict(reader, "scaler.pt", reader.read("scaler.pt")) or None
    state.notes.append("scaler.pt: loss scale" if state.scaler else "scaler.pt: empty, as scaling was off")
    return {"scaler.pt"}


def _read_objects(reader: ForeignReader, state: ImportedState) -> set[str]:
    files = reader.source.numbered(_OBJECTS)
    for name, value in zip(files, reader.read_all(files), strict=True):
        require_plain(value, name)
        if not isinstance(value, dict):
            raise reader.refused(name, f"its state_dict() is a {type(value).__name__}, not a dict")
        state.objects.append(value)
        state.notes.append(f"{name}: state of registered object {len(state.objects) - 1}")
    return set(files)


def _read_generators(reader: ForeignReader, state: ImportedState) -> set[str]:
    found = {**reader.source.matching(_RNG), **reader.source.matching(_TRAINER_RNG)}
    files = {int(rank or "0"): name for (rank,), name in found.items()}
    saved = reader.read_all(list(files.values()))
    for (rank, name), value in zip(files.items(), saved, strict=True):
        value = _named_as_accelerates(value)
        generators = generator_states(value, name, state.notes)
        if generators is not None:
            state.rng[rank] = generators
            state.notes.append(f"{name}: random generators of rank {rank}")
        if rank == 0 and state.step is None and isinstance(value, dict) and type(value.get("step")) is int:
            state.step = value["step"]
    if files and state.world_size is None:
        state.world_size = len(files)
    return set(files.values())


def _named_as_accelerates(saved: Any) -> Any:
    """Return a generators' file of the Trainer with Accelerate's keys; another one as it is."""
    if not isinstance(saved, dict) or "cpu" not in saved:
        return saved
    names = {"python": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed"}
    renamed = {names.get(key, key): value for key, value in saved.items() if key != "cuda"}
    devices = saved.get("cuda", [])
    return {**renamed, "torch_cuda_manual_seed": [devices] if isinstance(devices, torch.Tensor) else devices}


def _read_step(reader: ForeignReader, state: ImportedState) -> set[str]:
    if _TRAINER_STATE not in reader.source:
        return set()
    step = parse_json(reader.source.text(_TRAINER_STATE), str(reader.path(_TRAINER_STATE))).get("global_step")
    if type(step) is not int or step < 0:
        raise reader.broken(_TRAINER_STATE, "it has no global_step")
    state.step = step
    state.notes.append(f"{_TRAINER_STATE}: the number of steps; its history of metrics is left out")
    return {_TRAINER_STATE}


def _plain_dict(reader: ForeignReader, name: str, value: object) -> dict[str, object]:
    require_plain(value, name)
    if not isinstance(value, dict):
        raise reader.broken(name, f"it holds a {type(value).__name__}, not a dict")
    return value
