"""Names that scripts import from ``accelerate.checkpointing``: the states of single objects in files of their own.

The files are named and made as Accelerate names and makes them, so that either library reads what the other wrote.
``Accelerator.save_state`` writes its own format, which is verified when it is read.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from lockstep.checkpoint.contents import Stateful
from lockstep.checkpoint.weights import PICKLED_WEIGHTS, WEIGHTS
from lockstep.checkpoint.weights.model import save, save_object
from lockstep.comm.tree import Kwargs, StateDict
from lockstep.data_loader import IterableDatasetShard, SeedableRandomSampler
from lockstep.errors import CheckpointError
from lockstep.observe.log import get_logger
from lockstep.runtime import process
from lockstep.utils.constants import OPTIMIZER_NAME, RNG_STATE_NAME, SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME
from lockstep.utils.other import load

__all__ = ["load_accelerator_state", "load_custom_state", "save_accelerator_state", "save_custom_state"]

logger = get_logger(__name__)


class RandomDevice(Protocol):
    """``torch.cuda`` and the like."""

    def is_available(self) -> bool: ...

    def get_rng_state_all(self) -> list[torch.Tensor]: ...

    def set_rng_state_all(self, new_state: Iterable[torch.Tensor]) -> None: ...


def _numbered(name: str, index: int) -> str:
    stem, _, ending = name.partition(".")
    return f"{stem}_{index}.{ending}" if index else name


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[Mapping[str, object]],
    optimizers: Sequence[Stateful],
    schedulers: Sequence[Stateful],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write the states of single objects to an existing folder, in Accelerate's files. ``save_state`` has a format of
    its own.

    Rank 0 writes ``model.safetensors`` (or ``pytorch_model.bin``), ``optimizer.bin``, ``scheduler.bin``,
    ``sampler.bin`` and ``scaler.pt``. The second object of a kind has the number 1 in its name, and so on. Each
    process writes ``random_states_<rank>.pkl``.

    Args:
        output_dir: The folder.
        model_states: State dicts of models: name -> tensor of any shape.
        optimizers: Optimizers.
        schedulers: Learning rate schedulers.
        dataloaders: Data loaders.
        process_index: The rank, for the name of the file of random states.
        step: A number that ``load_accelerator_state`` returns.
        scaler: The loss scale of fp16. None: there is none.
        save_on_each_node: Let one process of each machine write, and not only rank 0.
        safe_serialization: Write weights as safetensors, which cannot run code when they are read.

    Returns:
        The folder.

    Examples:
        ```python
        import os
        import torch
        from lockstep.checkpointing import save_accelerator_state

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        os.makedirs("single_objects", exist_ok=True)
        save_accelerator_state("single_objects", [model.state_dict()], [optimizer], [], [], process_index=0, step=3)
        assert "optimizer.bin" in os.listdir("single_objects")
        ```
    """
    folder = Path(output_dir)
    for index, state in enumerate(model_states):
        name = _numbered(WEIGHTS if safe_serialization else PICKLED_WEIGHTS, index)
        save(state, folder / name, save_on_each_node, safe_serialization)
    for kind, objects in ((OPTIMIZER_NAME, optimizers), (SCHEDULER_NAME, schedulers)):
        for index, one in enumerate(objects):
            save(one.state_dict(), folder / _numbered(f"{kind}.bin", index), save_on_each_node)
    for index, loader in enumerate(dataloaders):
        sampler = _own_sampler(loader)
        if sampler is not None:
            save(sampler, folder / _numbered(f"{SAMPLER_NAME}.bin", index), save_on_each_node)
        if getattr(loader, "use_stateful_dataloader", False):
            save_object(loader.state_dict(), folder / _numbered("dl_state_dict.bin", index))
    if scaler is not None:
        save_object(scaler.state_dict(), folder / SCALER_NAME)
    save_object({"step": step, **_random_states()}, folder / f"{RNG_STATE_NAME}_{process_index}.pkl")
    logger.info("The state of this run is in %s.", folder)
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Stateful],
    schedulers: Sequence[Stateful],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: torch.amp.GradScaler | None = None,
    map_location: str | None = None,
    load_kwargs: Mapping[str, object] | None = None,
    **load_model_func_kwargs: object,
) -> StateDict:
    """Read the states that ``save_accelerator_state`` wrote into objects. No code in the files is run.

    Args:
        input_dir: The folder.
        models: Models.
        optimizers: Optimizers.
        schedulers: Learning rate schedulers.
        dataloaders: Data loaders.
        process_index: The rank, for the name of the file of random states.
        scaler: The loss scale of fp16. None: there is none.
        map_location: ``"cpu"`` or None: read to the CPU first. ``"on_device"``: read to this process's device.
        load_kwargs: Further arguments of ``torch.load``.
        load_model_func_kwargs: Arguments of ``safetensors.torch.load_model`` or of ``model.load_state_dict``.

    Returns:
        ``{"step": ...}``, or an empty mapping if there are no random states of this rank. A warning says so.

    Raises:
        TypeError: ``map_location`` is another value.
        CheckpointError: a file is missing.

    Examples:
        ```python
        import os
        import torch
        from lockstep.checkpointing import load_accelerator_state, save_accelerator_state

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        os.makedirs("objects_to_load", exist_ok=True)
        save_accelerator_state("objects_to_load", [model.state_dict()], [optimizer], [], [], process_index=0, step=3)
        assert load_accelerator_state("objects_to_load", [model], [optimizer], [], [], process_index=0)["step"] == 3
        ```
    """
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(
            f"map_location is {map_location!r}, but must be None, 'cpu' or 'on_device'. Use one of them."
        )
    device: torch.device | str = process.start_runtime().device if map_location == "on_device" else "cpu"
    folder, options = Path(input_dir), dict(load_kwargs or {})
    for index, model in enumerate(models):
        _load_model(model, folder, index, device, load_model_func_kwargs)
    for index, optimizer in enumerate(optimizers):
        state = _read(folder / _numbered(f"{OPTIMIZER_NAME}.bin", index), map_location=device, **options)
        optimizer.load_state_dict(state)
    for index, scheduler in enumerate(schedulers):
        scheduler.load_state_dict(_read(folder / _numbered(f"{SCHEDULER_NAME}.bin", index), **options))
    for index, loader in enumerate(dataloaders):
        if _own_sampler(loader) is not None:
            with torch.serialization.safe_globals([SeedableRandomSampler]):
                loader.set_sampler(_read(folder / _numbered(f"{SAMPLER_NAME}.bin", index)))
        stateful = folder / _numbered("dl_state_dict.bin", index)
        if getattr(loader, "use_stateful_dataloader", False) and stateful.exists():
            loader.load_state_dict(_read(stateful, **options))
    if scaler is not None:
        scaler.load_state_dict(_read(folder / SCALER_NAME))
    states = folder / f"{RNG_STATE_NAME}_{process_index}.pkl"
    if not states.exists():
        logger.warning("%s does not exist, so the states of random number generators are not loaded.", states)
        return {}
    found = _read(states)
    _set_random_states(found)
    return {"step": found["step"]} if "step" in found else {}


def _load_model(
    model: torch.nn.Module, folder: Path, index: int, device: torch.device | str, options: Kwargs
) -> None:
    path = folder / _numbered(WEIGHTS, index)
    if path.exists():
        from safetensors.torch import load_model

        load_model(model, path, device=str(device), **options)
    else:
        model.load_state_dict(
            _read(folder / _numbered(PICKLED_WEIGHTS, index), map_location=device), **options
        )


def _read(path: Path, **options: object) -> Any:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name the folder that save_accelerator_state wrote.")
    return load(path, **options)


def _own_sampler(loader: Any) -> object:
    """The sampler that is saved for itself: of a sharded stream that is drawn by seed and epoch."""
    if not isinstance(loader.dataset, IterableDatasetShard):
        return None
    sampler = loader.get_sampler()
    return sampler if isinstance(sampler, SeedableRandomSampler) else None


def _random_states() -> StateDict:
    states: StateDict = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    for key, device in _devices():
        states[key] = device.get_rng_state_all()
    return states


def _set_random_states(states: StateDict) -> None:
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    for key, device in _devices():
        if key in states:
            device.set_rng_state_all(states[key])


def _devices() -> Iterator[tuple[str, RandomDevice]]:
    """Those that are here, and what their states are called in the file."""
    names = {"torch_cuda_manual_seed": torch.cuda, "torch_xpu_manual_seed": torch.xpu}
    return ((key, device) for key, device in names.items() if device.is_available())


def save_custom_state(
    obj: Stateful, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False
) -> None:
    """Write the ``state_dict()`` of an object to ``custom_checkpoint_<index>.pkl`` in an existing folder, on rank 0.

    Args:
        obj: An object with a method ``state_dict``.
        path: The folder.
        index: The number in the name of the file.
        save_on_each_node: Let one process of each machine write, and not only rank 0.

    Examples:
        ```python
        import os
        import torch
        from lockstep.checkpointing import save_custom_state

        os.makedirs("custom", exist_ok=True)
        save_custom_state(torch.nn.Linear(4, 1), "custom", index=2)  # anything with a state_dict
        assert os.listdir("custom") == ["custom_checkpoint_2.pkl"]
        ```
    """
    save(obj.state_dict(), Path(path) / f"custom_checkpoint_{index}.pkl", save_on_each_node)


def load_custom_state(obj: Stateful, path: str | os.PathLike[str], index: int = 0) -> None:
    """Read the state that ``save_custom_state`` wrote into an object.

    The file may have tensors of any shape and plain values only. No code in it is run.

    Args:
        obj: An object with a method ``load_state_dict``.
        path: The folder.
        index: The number in the name of the file.

    Raises:
        CheckpointError: the file does not exist.

    Examples:
        ```python
        import os
        import torch
        from lockstep.checkpointing import load_custom_state, save_custom_state

        layer, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        os.makedirs("custom_to_load", exist_ok=True)
        save_custom_state(layer, "custom_to_load")
        load_custom_state(other, "custom_to_load")
        assert torch.equal(other.weight, layer.weight)
        ```
    """
    obj.load_state_dict(_read(Path(path) / f"custom_checkpoint_{index}.pkl", map_location="cpu"))
