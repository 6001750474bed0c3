"""A folder of DeepSpeed's ``save_checkpoint``: ``latest``, and ``<tag>/*_model_states.pt``, ``*_optim_states.pt``.

Each rank has flat fp32 vectors of the weights that it owned; ``param_shapes`` names the parameters in their
order. The moments of the inner optimizer have the same layout, under the number of their vector.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.tree import StateDict
from lockstep.compat.checkpoints.reader import ForeignReader
from lockstep.compat.checkpoints.roles import is_optimizer, is_weights, optimizer
from lockstep.compat.checkpoints.state import ImportedState, require_plain
from lockstep.compat.checkpoints.tensors import StoredObject
from lockstep.compat.checkpoints.zero import (
    ZeroSpan,
    checked_shape,
    join_stage_1_and_2,
    join_stage_3,
    spans_of_stage_1_and_2,
    spans_of_stage_3,
)
from lockstep.errors import CheckpointError
from lockstep.torch_internals import optim as torch_optim

_OPTIMIZER = r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"
_MODEL = r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt"
_LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
# What DeepSpeed itself puts beside the module; anything else is the script's.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "ds_config", "ds_version", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",
    "universal_checkpoint_info", "sparse_tensor_module_names",
}  # fmt: skip
Join = Callable[[ZeroSpan, list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Partitions:
    """What the ranks hold: by rank and group the weights, by rank the inner optimizer's state."""

    stage: int
    vectors: list[list[torch.Tensor]]
    inner: list[StateDict]
    spans: list[ZeroSpan]
    join: Join


def is_deepspeed(names: list[str]) -> bool:
    """Return whether a folder with files of these names is one tag of DeepSpeed."""
    return any(re.fullmatch(_MODEL, name) for name in names)


def tag_folder(reader: ForeignReader, folder: str = "") -> str | None:
    """Return the folder of the tag that ``latest`` names, or ``folder`` itself; None if neither is DeepSpeed's."""
    if is_deepspeed(reader.source.below(folder)):
        return folder
    # ds_to_universal.py writes a file of its own, beside the one of the run.
    names = [f"{folder}/{name}".removeprefix("/") for name in ("latest", "latest_universal")]
    latest = next((name for name in names if name in reader.source), None)
    if latest is None:
        return None
    tag = reader.source.text(latest, 4096).strip()
    if not re.fullmatch(r"[\w.\-]+", tag) or tag in (".", ".."):
        raise reader.broken(latest, f"{tag[:80]!r} is not the plain name of a folder")
    inner = f"{folder}/{tag}" if folder else tag
    if not is_deepspeed(reader.source.below(inner)):
        raise CheckpointError(
            f"{reader.path(latest)} names the tag {tag!r}, but this folder has no model states of it. Copy the "
            "whole folder, or pass the folder of another tag."
        )
    return inner


def read_deepspeed(reader: ForeignReader, folder: str) -> ImportedState:
    """Return the state in ``folder``, one tag.

    Raises:
        CheckpointError: ranks are missing, the model was cut over tensor, pipeline or expert ranks, or the files
            contradict each other.
    """
    models, optims = _files(reader, folder)
    loaded = reader.read_all(models)
    first = loaded[0]
    if not isinstance(first, dict) or not isinstance(first.get("module"), dict):
        raise reader.broken(models[0], "it has no 'module'")
    state = ImportedState("DeepSpeed", world_size=len(optims) or first.get("dp_world_size"))
    state.step = first.get("global_steps")
    if universal := _universal_files(reader, folder):
        _read_universal(reader, loaded, models[0], universal, state)
    elif optims:
        _read_zero(reader, loaded, models[0], optims, state)
    else:
        _read_plain(reader, first, models[0], state)
    _read_rest(first, models[0], state)
    return state


def _files(reader: ForeignReader, folder: str) -> tuple[list[str], list[str]]:
    """Return the files with models and with optimizers, by rank."""
    prefix = f"{re.escape(folder)}/" if folder else ""
    found = [reader.source.matching(prefix + pattern) for pattern in (_MODEL, _OPTIMIZER)]
    cut = [n for n in reader.source.below(folder) if re.match(r"(layer_|expert_|expp_rank_)", n)]
    if not _universal_files(reader, folder):
        cut += [name for files in found for (_, tensor_rank), name in files.items() if int(tensor_rank)]
    if cut:
        raise CheckpointError(
            f"{reader.path(folder)} has {cut[0]}: DeepSpeed divided this model over tensor, pipeline or expert "
            "ranks. Run deepspeed/checkpoint/ds_to_universal.py on it, and import what that writes."
        )
    found = [{ranks: name for ranks, name in files.items() if not int(ranks[1])} for files in found]
    by_rank = [{int(rank or 0): name for (rank, _), name in files.items()} for files in found]
    for kind, files in zip(("model", "optimizer"), by_rank, strict=True):
        if sorted(files) != list(range(len(files))):
            raise CheckpointError(
                f"{reader.path(folder)} has the {kind} states of ranks {sorted(files)} only, so some are "
                "missing. Copy the whole folder."
            )
    models, optims = ([files[rank] for rank in sorted(files)] for files in by_rank)
    return models, optims


# --------------------------------------------------------------------------------------------------- ZeRO


def _read_zero(
    reader: ForeignReader, models: list[dict[str, object]], name: str, optims: list[str], state: ImportedState
) -> None:
    read = zip(optims, reader.read_all(optims), strict=True)
    saved = [_optimizer_state(reader, file, value) for file, value in read]
    # One number, or a list with one for each group.
    counts = saved[0].get("partition_count", len(saved))
    world = max(counts) if isinstance(counts, list) and counts else counts
    if world != len(saved):
        raise CheckpointError(
            f"{reader.path(name)} was saved by {world} ranks, but {len(saved)} files of optimizer states are "
            "here. Copy the whole folder."
        )
    try:
        partitions = _partitions(models[0], saved, reader)
        weights = _weights(models, partitions)
        moments = _moments(partitions, saved[0])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = f"{type(error).__name__}: {str(error)[:160]}"
        raise reader.broken(name, f"its ZeRO partitions do not fit together ({reason})") from None
    require_plain(moments, optims[0])
    state.models.append(weights)
    state.optimizers.append(moments)
    state.scaler = _scaler(reader, optims[0], saved[0].get("loss_scaler"))
    state.notes += [
        f"{name}: names, shapes and buffers of the weights",
        f"{optims[0]} and those of {world - 1} more ranks: ZeRO stage {partitions.stage}, put together; its fp32 "
        "weights became the weights",
    ]


def _optimizer_state(reader: ForeignReader, file: str, value: object) -> dict[str, object]:
    state = value.get("optimizer_state_dict") if isinstance(value, dict) else None
    if not isinstance(state, dict):
        raise reader.broken(file, "it has no 'optimizer_state_dict'")
    if not {"fp32_flat_groups", "single_partition_of_fp32_groups"} & state.keys():
        raise reader.broken(file, f"it has no flat fp32 groups, but {sorted(map(str, state))[:8]}")
    return state


def _partitions(first: StateDict, saved: list[StateDict], reader: ForeignReader) -> Partitions:
    """Read the partitions. Raises KeyError, TypeError or ValueError where the files are not of DeepSpeed's form."""
    is_stage_3 = "fp32_flat_groups" in saved[0]
    vectors_key, inner_key = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if is_stage_3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    vectors = [[group.reshape(-1) for group in entry[vectors_key]] for entry in saved]
    if len({len(rank) for rank in vectors}) != 1 or not all(
        v.is_floating_point() for rank in vectors for v in rank
    ):
        raise ValueError("the ranks have different groups")
    shapes, inner = first["param_shapes"], [entry[inner_key] for entry in saved]
    if is_stage_3:
        spans = spans_of_stage_3(shapes, [len(vector) for vector in vectors[0]], len(saved))
        return Partitions(
            3, vectors, inner, spans, lambda s, by_rank: join_stage_3(s, by_rank, reader.scratch)
        )
    spans = spans_of_stage_1_and_2(shapes, saved[0].get("param_alignment_paddings"))
    # The optimizer for bf16 does not say, and is stage 1.
    stage = saved[0].get("zero_stage", 1)
    return Partitions(
        int(stage), vectors, inner, spans, lambda s, by_rank: join_stage_1_and_2(s, by_rank, reader.scratch)
    )


def _weights(models: list[StateDict], partitions: Partitions) -> dict[str, torch.Tensor]:
    """Trained and frozen parameters, buffers (in fp32, as DeepSpeed's own script has them) and tied names."""
    first = models[0]
    weights = {
        span.name: partitions.join(span, [rank[span.group] for rank in partitions.vectors])
        for span in partitions.spans
    }
    # Stage 3 cuts frozen parameters, too; otherwise the first rank has them whole.
    owners = models if partitions.stage == 3 else models[:1]
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        fragments = [model["frozen_param_fragments"][name].reshape(-1) for model in owners]
        size = math.prod(checked_shape(shape))
        span = ZeroSpan(name, checked_shape(shape), 0, 0, -(-size // len(owners)))
        weights[name] = partitions.join(span, fragments)
    for name in first["buffer_names"]:
        buffer = first["module"][name]
        weights[name] = buffer.float() if buffer.is_floating_point() else buffer
    for tied, owner in (first.get("shared_params") or {}).items():
        if owner in weights:
            weights[tied] = weights[owner]
    # There the module has empty places; else it has whatever is still without a value.
    if partitions.stage != 3:
        weights = first["module"] | weights
    ordered = {name: weights[name] for name in first["module"] if name in weights} | weights
    if not is_weights(ordered):
        raise ValueError("it should be a dict of tensors, but holds other values")
    return ordered


def _moments(partitions: Partitions, saved: dict[str, object]) -> dict[str, object]:
    """Return the inner optimizer's state by the names of the parameters."""
    groups, states = _groups_and_states(partitions.inner, saved)
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) != len(partitions.vectors[0]):
        raise ValueError(
            f"there are {len(numbers)} vectors in the optimizer, {len(partitions.vectors[0])} of weights"
        )
    found: dict[str, dict[str, object]] = {}
    for span in partitions.spans:
        by_rank = [state.get(numbers[span.group], {}) for state in states]
        # A vector of the weights may lack the padding at its end that the moments have.
        least = partitions.vectors[0][span.group].numel()
        own = {}
        for key, value in by_rank[0].items():
            is_vector = isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() >= least
            own[key] = (
                partitions.join(span, [entry[key].reshape(-1) for entry in by_rank]) if is_vector else value
            )
        if own:
            found[span.name] = own
    return {"state": found, "param_groups": _named_groups(groups, partitions.spans)}


def _named_groups(groups: list[StateDict], spans: list[ZeroSpan]) -> list[StateDict]:
    """Return groups with the names of parameters for the numbers of their vectors."""
    numbers = [number for group in groups for number in group["params"]]
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [span.name for span in spans if numbers[span.group] in group["params"]]}
        for group in groups
    ]


def _groups_and_states(
    inner: list[StateDict], saved: dict[str, object]
) -> tuple[list[StateDict], list[dict[object, Any]]]:
    """Of the inner optimizer's ``state_dict()``, or of its "elastic" form: a list of states, one for each group."""
    if all(isinstance(entry, list) for entry in inner):
        step = {"step": saved["base_optimizer_state_step"]} if "base_optimizer_state_step" in saved else {}
        groups = [{"params": [i]} | step for i in range(len(inner[0]))]
        return groups, [dict(enumerate(entry)) for entry in inner]
    if not all(is_optimizer(entry) for entry in inner):
        raise ValueError("the inner optimizer's state has an unknown form")
    return inner[0]["param_groups"], [entry["state"] for entry in inner]


def _scaler(reader: ForeignReader, file: str, saved: object) -> dict[str, object] | None:
    """``torch.amp.GradScaler.state_dict()`` of a dynamic loss scale; a static one is no state."""
    if not isinstance(saved, StoredObject) or saved.name != _LOSS_SCALER:
        return None
    try:
        window, factor = int(saved.get("scale_window")), float(saved.get("scale_factor"))
        # Steps since the last overflow, which torch counts up to growth_interval.
        good_steps = int(saved.get("cur_iter")) - int(saved.get("last_overflow_iter")) - 1
        return {
            "scale": float(saved.get("cur_scale")),
            "growth_factor": factor,
            "backoff_factor": 1 / factor,
            "growth_interval": window,
            torch_optim.GROWTH_TRACKER: good_steps % window,
        }
    except (TypeError, ValueError, ZeroDivisionError):
        raise reader.broken(file, "its loss scale is incomplete") from None


# ---------------------------------------------------------------------------------------------- universal


def _universal_files(reader: ForeignReader, folder: str) -> dict[tuple[str, ...], str]:
    """Return the files of the universal form by parameter and kind: ``zero/up.weight/exp_avg.pt``."""
    prefix = f"{re.escape(folder)}/" if folder else ""
    return reader.source.matching(rf"{prefix}zero/([^/]+)/(\w+)\.pt")


def _read_universal(
    reader: ForeignReader,
    models: list[StateDict],
    name: str,
    files: dict[tuple[str, ...], str],
    state: ImportedState,
) -> None:
    """Read what ``ds_to_universal.py`` wrote (0.19.8): whole tensors, which stage 3 leaves flat."""
    rest = next(iter(files.values())).rsplit("/", 2)[0] + "/optimizer_state.pt"
    saved, *values = reader.read_all([rest, *files.values()])
    try:
        spans = spans_of_stage_1_and_2(models[0]["param_shapes"])
        shapes = {span.name: span.shape for span in spans}
        moments: dict[str, StateDict] = {parameter: {} for parameter in shapes}
        for (parameter, kind), value in zip(files, values, strict=True):
            # Files of parameters that were not trained, and of buffers, have less than the model's file.
            if parameter in shapes:
                tensor = value["param"] if isinstance(value, dict) else value
                moments[parameter][kind] = (
                    tensor.view(shapes[parameter]) if tensor is value and kind != "step" else tensor
                )
        trained = {parameter: kinds.pop("fp32") for parameter, kinds in moments.items()}
        # Those of which there are moments, or of which the model's file has the whole.
        whole = {*(key for key, kinds in moments.items() if kinds), *models[0]["buffer_names"]}
        untrained = models[0]["module"].keys() - whole - set(models[0].get("shared_params") or ())
        partitions = Partitions(
            3 if "fp32_flat_groups" in saved else 1, [], [], spans,
            lambda span, by_rank: join_stage_3(span, by_rank, reader.scratch) if by_rank else trained[span.name],
        )  # fmt: skip
        weights = _weights(models, partitions)
        # Stage 3 has the step beside the vectors of its first rank.
        inner = saved.get("optimizer_state_dict", saved)
        numbers = [number for group in inner["param_groups"] for number in group["params"]]
        for span in spans:
            own = inner.get("state", {}).get(numbers[span.group], {})
            moments[span.name].update({"step": own["step"]} if "step" in own else {})
        optimizer_state: StateDict = {
            "state": {parameter: kinds for parameter, kinds in moments.items() if kinds},
            "param_groups": _named_groups(inner["param_groups"], spans),
        }
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise reader.broken(
            rest, f"it does not fit the rest ({type(error).__name__}: {str(error)[:160]})"
        ) from None
    if untrained and re.sub(r"mp_rank_\d+", "mp_rank_01", name) in reader.source:
        raise CheckpointError(
            f"{reader.path(name)} has one tensor rank's part of {min(untrained)}, which was not trained, and "
            "ds_to_universal.py joins trained parameters only. Import what save_16bit_model writes."
        )
    require_plain(optimizer_state, rest)
    state.optimizers.append(optimizer_state)
    state.layout = "DeepSpeed's universal form"
    state.models.append(weights)
    state.scaler = _scaler(reader, rest, saved.get("loss_scaler"))
    state.notes.append(
        f"{name} and {len(files)} files of the universal form: fp32 weights, and the optimizer's state"
    )


# ------------------------------------------------------------------------------------------------- the rest


def _read_plain(reader: ForeignReader, first: StateDict, name: str, state: ImportedState) -> None:
    """Without ZeRO everything is in one file."""
    if not is_weights(first["module"]):
        raise reader.broken(name, "its 'module' should hold tensors only, but holds other values")
    state.models.append(first["module"])
    state.notes.append(f"{name}: weights")
    saved = first.get("optimizer")
    if saved is None:
        return
    if not is_optimizer(saved):
        raise CheckpointError(
            f"{reader.path(name)} has the optimizer of DeepSpeed's fp16 or bf16 mode without ZeRO, in which the "
            "parameters have no names. Save it under ZeRO stage 1, or import its 'module' only."
        )
    state.optimizers.append(optimizer(saved, f"{name}['optimizer']"))


def _read_rest(first: dict[str, object], name: str, state: ImportedState) -> None:
    """Read the scheduler, and what the script gave as ``client_state``."""
    scheduler = first.get("lr_scheduler")
    if isinstance(scheduler, dict):
        require_plain(scheduler, f"{name}['lr_scheduler']")
        state.schedulers.append(scheduler)
        state.notes.append(f"{name}['lr_scheduler']: state of scheduler 0")
    for key in ("data_sampler", "random_ltd"):
        if first.get(key) is not None:
            state.notes.append(f"{name}['{key}']: left out, because Lockstep has no such state")
    if "ds_config" in first:
        state.notes.append(
            f"{name}['ds_config']: left out; `lockstep config convert` reads the file it came from"
        )
    for key, value in first.items():
        if key not in _OWN:
            require_plain(value, f"{name}[{key!r}]")
            state.other[key] = value
            state.notes.append(f"{name}[{key!r}]: kept beside the rest, as the script put it there")
