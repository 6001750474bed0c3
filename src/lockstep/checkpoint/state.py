"""Save and load the state of a training run: one directory, safetensors and JSON, no pickle.

    model.safetensors, model_1.safetensors, ...   one for each prepared model
    state.json, state.safetensors                 optimizers, schedulers, loss scale, loaders, custom objects
    rng_0.json, rng_0.safetensors, ...            random number generators, one pair for each rank

The directory appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.checkpoint.codec import decode, encode
from lockstep.checkpoint.model import check_weights, read_weights, save_object
from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import is_dtensor, shard_like, whole
from lockstep.comm.together import together
from lockstep.config.handlers import ProjectConfiguration
from lockstep.errors import CheckpointError, UsageError
from lockstep.runtime.process import Runtime
from lockstep.runtime.seed import rng_state, set_rng_state

HOW_TO_STEP = ("foreach", "fused")
"""Entries of a parameter group that a run keeps as they are: what suits whole parameters need not suit shards."""

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


@dataclass
class Hooks:
    """Functions of the user that run before a state is saved or loaded.

    A model whose entry a hook takes out of the list of weights (of models, when loading) is left to it.
    """

    save: OrderedDict[int, SaveHook] = field(default_factory=OrderedDict)
    load: OrderedDict[int, LoadHook] = field(default_factory=OrderedDict)

    @staticmethod
    def add(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle


@dataclass
class Training:
    """What a checkpoint holds. ``models`` are unwrapped; the others have ``state_dict``/``load_state_dict``."""

    models: list[nn.Module]
    parts: dict[str, list[Any]]

    def stateful(self) -> Iterator[tuple[str, Any]]:
        for kind, objects in self.parts.items():
            for i, item in enumerate(objects):
                yield f"{kind}.{i}", item


def save(
    directory: Path,
    training: Training,
    hooks: Hooks,
    runtime: Runtime,
    communicator: Communicator,
    on_each_node: bool = False,
) -> None:
    """Write the directory; collective. An error on any rank is raised on all, and nothing is published.

    ``on_each_node``: machines share no file system, so each writes a directory of its own.
    """
    writes = runtime.is_local_main if on_each_node else runtime.is_main
    partial = directory.with_name(directory.name + ".partial")
    with together(communicator):
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    with together(communicator):
        weights: list[dict[str, Any]] = [model.state_dict() for model in training.models]
        states = {name: item.state_dict() for name, item in training.stateful()}
    # Shards are gathered outside of the blocks in which one rank alone may fail.
    weights, states = whole(weights, keep=writes or bool(hooks.save)), whole(states, keep=writes)
    with together(communicator):
        for hook in list(hooks.save.values()):
            hook(list(training.models), weights, str(partial))
        _write_tree(rng_state(), partial, f"rng_{runtime.rank}")
        if writes:
            for i, state in enumerate(weights):
                save_object(state, partial / _model_name(i), safe_serialization=True)
            _write_tree(states, partial, "state")
    with together(communicator):
        if writes:
            _publish(partial, directory)


def load(
    directory: Path, training: Training, hooks: Hooks, runtime: Runtime, communicator: Communicator
) -> None:
    """Read what ``save`` wrote, into the same objects; collective.

    All ranks look at everything before anything is changed. What the objects' own ``load_state_dict`` refuses
    after that leaves those before it loaded.

    Raises:
        CheckpointError: the directory is missing, incomplete, of another set of objects or of other shapes.
    """
    with together(communicator):
        if not directory.is_dir():
            raise CheckpointError(
                f"There is no checkpoint at {directory}. Pass a directory that save_state wrote."
            )
        models = list(training.models)
        for hook in list(hooks.load.values()):
            hook(models, str(directory))
        state = _read_tree(directory, "state")
        objects = dict(training.stateful())
        if state.keys() != objects.keys():
            raise CheckpointError(
                f"{directory} holds {sorted(state)}, but this run has prepared {sorted(objects)}. Prepare and register "
                "the same objects in the same order as the run that saved it."
            )
        for i, model in enumerate(models):
            check_weights(model, directory, _model_name(i))
        for name, item in objects.items():
            if name.startswith("optimizer."):
                state[name] = _sharded(state[name], item, name)
        generators = f"rng_{runtime.rank}"
        saved_by_fewer = not (directory / f"{generators}.json").exists()
        rng = None if saved_by_fewer else _read_tree(directory, generators)
    with together(communicator):
        for i, model in enumerate(models):
            read_weights(model, directory, _model_name(i))
        for name, item in objects.items():
            item.load_state_dict(state[name])
        if rng is not None:
            set_rng_state(rng)


def _sharded(state: dict[str, Any], optimizer: Any, name: str) -> dict[str, Any]:
    """The state of an optimizer with whole tensors, sharded as its parameters are.

    Raises:
        CheckpointError: it has other groups than the optimizer, or tensors that cannot be sharded alike.
    """
    saved, mine = (
        [len(group["params"]) for group in groups]
        for groups in (state["param_groups"], optimizer.param_groups)
    )
    if saved != mine:
        raise CheckpointError(
            f"{name} was saved with groups of {saved} parameters, but has groups of {mine} here. Build it as the run "
            "that saved it did."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    places = dict(zip(numbers, parameters, strict=True))

    def shard(number: Any, key: str, value: Any) -> Any:
        parameter = places[number]
        if not isinstance(value, torch.Tensor) or not value.ndim or not is_dtensor(parameter):
            return value
        if value.shape != parameter.shape:
            raise CheckpointError(
                f"{name} holds '{key}' of shape {tuple(value.shape)} for its parameter {number}, which has shape "
                f"{tuple(parameter.shape)} here. Give it its parameters in the order of the run that saved it."
            )
        return shard_like(value, parameter)

    sharded = {
        number: {key: shard(number, key, value) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    groups = [
        saved_group | {key: group[key] for key in HOW_TO_STEP if key in group and key in saved_group}
        for saved_group, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state, "state": sharded, "param_groups": groups}


def next_directory(output_dir: str | None, project: ProjectConfiguration) -> Path:
    """Where ``save_state`` writes: the given directory, or the project's next numbered one.

    Raises:
        UsageError: neither a directory nor automatic naming, or the numbered one exists.
    """
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise UsageError(
                "save_state was called without a directory. Pass one, or ProjectConfiguration(project_dir=..., "
                "automatic_checkpoint_naming=True)."
            )
        return Path(output_dir).expanduser()
    directory = _checkpoints(project) / f"checkpoint_{project.iteration}"
    if directory.exists():
        raise UsageError(
            f"{directory} exists already (project iteration {project.iteration}). Load it first, or set "
            "ProjectConfiguration.iteration to the number that comes next."
        )
    return directory


def prune(project: ProjectConfiguration) -> None:
    """Remove the oldest numbered checkpoints beyond ``total_limit``; called after a new one is complete."""
    if project.automatic_checkpoint_naming and project.total_limit is not None:
        for old in numbered(_checkpoints(project))[: -project.total_limit]:
            shutil.rmtree(old)


def latest_directory(input_dir: str | None, project: ProjectConfiguration) -> Path:
    """Where ``load_state`` reads: the given directory, or the project's newest numbered one."""
    if input_dir is not None:
        return Path(input_dir).expanduser()
    if not project.automatic_checkpoint_naming:
        raise UsageError("load_state was called without a directory. Pass the one that save_state wrote.")
    found = numbered(_checkpoints(project))
    if not found:
        raise CheckpointError(f"There is no checkpoint in {_checkpoints(project)}. Save one first.")
    return found[-1]


def numbered(folder: Path) -> list[Path]:
    """The complete checkpoints ``checkpoint_<i>`` in ``folder``, oldest first; other files are ignored."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r"checkpoint_(\d+)", path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return [found[i] for i in sorted(found)]


def number_after(directory: Path, default: int) -> int:
    """The number of the checkpoint that follows ``checkpoint_<i>``; ``default`` for other names."""
    match = re.fullmatch(r"checkpoint_(\d+)", directory.name)
    return int(match[1]) + 1 if match else default


def checked_stateful(objects: Iterable[Any]) -> list[Any]:
    """The objects, if all of them can be saved and loaded; else UsageError."""
    objects = list(objects)
    for item in objects:
        if not (
            callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
        ):
            raise UsageError(
                f"register_for_checkpointing got a {type(item).__name__} without state_dict() and load_state_dict(). "
                "Give it both, or leave it out."
            )
    return objects


def _checkpoints(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise UsageError(
            "automatic_checkpoint_naming needs a place. Pass project_dir to ProjectConfiguration."
        )
    return Path(project.project_dir).expanduser() / "checkpoints"


def _model_name(i: int) -> str:
    return "model.safetensors" if i == 0 else f"model_{i}.safetensors"


def _write_tree(state: Any, directory: Path, name: str) -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(state, tensors), allow_nan=False)
    save_file(tensors, str(directory / f"{name}.safetensors"))
    (directory / f"{name}.json").write_text(text, encoding="utf-8")


def _read_tree(directory: Path, name: str) -> Any:
    try:
        text = (directory / f"{name}.json").read_text(encoding="utf-8")
        return decode(json.loads(text), load_file(str(directory / f"{name}.safetensors")))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory / name}.json or its tensors cannot be read: {error}. Load another checkpoint."
        ) from error


def _publish(partial: Path, directory: Path) -> None:
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
