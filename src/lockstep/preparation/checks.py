"""What ``prepare`` refuses."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Set
from types import FrameType, ModuleType
from typing import NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lockstep.comm.tree import children
from lockstep.config.parallel import Parallel
from lockstep.config.values import plain, suggestion
from lockstep.errors import ConfigError, UsageError
from lockstep.observe.log import get_logger
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.torch_internals import autograd
from lockstep.torch_internals.modules import OWN_ATTRIBUTES, buffers_of
from lockstep.torch_internals.tensors import has_storage, storage_key, storage_uses
from lockstep.user_call import OF_ALL_RANKS, UserCall, call_on_one_rank

logger = get_logger(__name__)

ParameterPlaces = dict[int, list[tuple[int, int, str]]]
"""Storage -> (first element, behind the last one, name) of the parameters in it."""
MOST_LINKS = 8
"""From an attribute of a module to a tensor: a function, its closure, a list, and so on."""


class PreparedObjects:
    """The objects that ``prepare`` got and those that it made of them: each is prepared once."""

    def __init__(self) -> None:
        self._given: list[object] = []
        self._made: list[object] = []

    def add(self, given: object, made: object) -> None:
        self._given.append(given)
        self._made.append(made)

    def has_made(self, item: object) -> bool:
        """Return whether ``prepare`` returned it, and so returns it again.

        Raises:
            UsageError: it was prepared, and another object took its place.
        """
        if any(item is known for known in self._made):
            return True
        if any(item is known for known in self._given):
            raise UsageError(
                f"A {type(item).__name__} was passed to prepare twice. Prepare each object once and use what prepare "
                "returned."
            )
        return False

    def clear(self) -> None:
        self._given.clear()
        self._made.clear()


def check_backend(backend: object) -> None:
    """Raise ConfigError unless this torch has a backend of that name; functions are backends themselves."""
    if backend is None or callable(backend):
        return
    known = sorted(torch.compiler.list_backends(exclude_tags=()))
    if backend not in known:
        raise ConfigError(
            f"dynamo_backend={plain(backend)} is no backend of torch.compile in torch "
            f"{torch.__version__}.{suggestion(str(backend), known)} Use one of {', '.join(known)}, or register "
            "it first."
        )


def refuse_saves_of_parts(parallel: Parallel) -> None:
    """Raise UsageError if the script saves on one rank only what each rank has a part of."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    call = call_on_one_rank(script, OF_ALL_RANKS) if script else UserCall()
    if call.name:
        raise UsageError(
            f"{call.line} calls {call.name} on one rank only, but with parallel={str(parallel)!r} each rank has a part "
            "of the state. Call it on every rank, outside of the if."
        )


def refuse_replicas(model: nn.Module) -> None:
    """Raise UsageError for models that others have spread."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UsageError(
            f"prepare() wraps the model itself, but got a {type(model).__name__}. Pass the plain model "
            "(`model.module`), and pass options of DDP as DistributedDataParallelKwargs."
        )


def check_micro_batch(loader: DataLoader[object], rows_per_process: int | None, ranks_per_batch: int) -> None:
    """Raise UsageError unless the loader's batches are as a configuration says; None: it says nothing."""
    if rows_per_process is None or loader.batch_size is None:
        return
    wanted = rows_per_process * ranks_per_batch
    if loader.batch_size != wanted:
        raise UsageError(
            f"The loader has batch_size={loader.batch_size}, but the DeepSpeed configuration says {rows_per_process} "
            f"rows for each process. Pass batch_size={wanted} to the loader, or 'auto' in the configuration."
        )


def refuse_lookalike(item: object) -> None:
    """Raise UsageError for an object that steps parameters but is no ``torch.optim.Optimizer``.

    Where a model gets other parameters than it had, nobody would give them to such an object: it would train nothing.
    """
    prepared = (nn.Module, Optimizer, DataLoader)
    if isinstance(item, (type, *prepared)):
        return
    if callable(getattr(item, "step", None)) and callable(getattr(item, "zero_grad", None)):
        raise UsageError(
            f"prepare got a {type(item).__name__}, which has a step() but is not a torch.optim.Optimizer, so it "
            "cannot get the parameters of the prepared model. Derive its class from torch.optim.Optimizer, or "
            "pass the optimizer inside it to prepare() and wrap the optimizer that prepare() returns."
        )


def refuse_unknown_loader(item: object, ranks: int) -> None:
    """Raise UsageError for an object that gives batches but is no ``DataLoader``: every rank would get all of them.

    On one rank, warn that its position is not saved.
    """
    if isinstance(item, (type, str, bytes, nn.Module, Optimizer, DataLoader, torch.Tensor, Set)):
        # Not asked for attributes, which those of models and others may refuse in their own way.
        return
    # What has rows by their numbers is a data set or a container. webdataset's WebLoader is an IterableDataset.
    has_rows = hasattr(item, "__getitem__") and not isinstance(item, IterableDataset)
    if not hasattr(item, "__iter__") or has_rows:
        return
    name = f"{type(item).__module__}.{type(item).__name__}"
    if ranks == 1:
        logger.warning(
            "prepare got a %s, which gives batches but is no torch.utils.data.DataLoader. So no position in it is "
            "saved, and a resumed run begins its epoch again. Pass it to register_for_checkpointing() if it has "
            "state_dict() and load_state_dict(). Otherwise put it into an IterableDataset and a "
            "DataLoader(..., batch_size=None).",
            name,
        )
        return
    raise UsageError(
        f"prepare got a {name}, which gives batches but is no "
        f"torch.utils.data.DataLoader. So it cannot be divided, and all {ranks} ranks would train on the same "
        "rows. Put it into an IterableDataset and a DataLoader(..., batch_size=None). Or leave it out of "
        "prepare() if it gives each rank other rows."
    )


def check_trained(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Raise UsageError if the optimizer trains others than these."""
    known = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    strangers = [p for group in groups for p in group["params"] if p.requires_grad and id(p) not in known]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        raise UsageError(
            f"{type(optimizer).__name__} holds {len(strangers)} parameters (shapes {shapes}"
            f"{', ...' if len(strangers) > 3 else ''}) of no prepared model. Their gradients are not averaged, so "
            "the ranks would drift apart. Pass their model to accelerator.prepare(), and make the optimizer from "
            "that model's parameters."
        )


def refuse_offloaded_quantized(model: nn.Module) -> None:
    """Raise ConfigError for a model of 4-bit or 8-bit weights of which a device map keeps some off the accelerator."""
    device_map = getattr(model, "hf_device_map", None) or {}
    is_quantized = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    places = {str(device) for device in device_map.values()}
    if is_quantized and places & {"cpu", "disk"}:
        raise ConfigError(
            f"{type(model).__name__} has weights of 4 or 8 bits, and its device map places some on "
            f"{' and '.join(sorted(places & {'cpu', 'disk'}))}. It cannot be trained with CPU or disk offload. "
            "Load all of it on the accelerator."
        )
    if is_quantized and len(places) > 1:
        raise ConfigError(
            f"{type(model).__name__} has weights of 4 or 8 bits on several devices "
            f"({', '.join(sorted(places))}), but can be trained on one device only. Load it on the device of "
            f"each process: device_map={{'': accelerator.device}}."
        )


def refuse_aliases(model: nn.Module, parallel: Parallel) -> None:
    """Raise UsageError for tensors in the memory of a parameter, which is about to get another memory.

    Such are parameters that were tied by ``.data``, and detached weights in buffers, attributes, and what these hold.
    Warns where only the script holds such a tensor, as in a ``state_dict()`` that it may not need any more.
    """
    kind = type(model).__name__
    places = refuse_ties(dict(model.named_parameters()), kind, parallel)
    known, plain_types = set(map(id, model.parameters())), (torch.Tensor, nn.Parameter)
    for prefix, module in model.named_modules():
        values = {**buffers_of(module), **{n: v for n, v in vars(module).items() if n not in OWN_ATTRIBUTES}}
        for name, value in values.items():
            for one in (value, *(part for _, part in children(value) or ())):
                # Spectral norm and pruning keep the weight as an attribute, and compute it anew in each forward.
                if hasattr(module, f"{name}_orig"):
                    known.add(id(one))
                elif type(one) not in plain_types or id(one) in known or not one.numel():
                    continue
                elif (first := _owner(places, one)) is not None:
                    raise _alias(f"'{prefix + '.' if prefix else ''}{name}' of {kind}", first, parallel)
    # Each parameter counts in its storage, and so does the storage's Python object. To look at all objects takes long.
    if all((storage_uses(p) or 0) <= 1 + len(places.get(storage_key(p), ())) for p in model.parameters()):
        return
    suspects = [
        (one, first)
        for one in gc.get_objects()
        if type(one) in (torch.Tensor, nn.Parameter)
        and id(one) not in known
        and has_storage(one)
        and one.numel()
        if (first := _owner(places, one)) is not None
    ]
    loose = None
    for one, first in suspects:
        if (keeper := _keeper(one)) is not None:
            raise _alias(f"What {keeper} holds, or a function in it,", first, parallel)
        loose = loose or first
    if loose is not None:
        warnings.warn(str(_alias("What the script holds", loose, parallel)), stacklevel=4)


def refuse_ties(parameters: Mapping[str, nn.Parameter], kind: str, parallel: Parallel) -> ParameterPlaces:
    """Raise UsageError if two parameters of a model of class ``kind`` share memory. Returns where they lie."""
    places: ParameterPlaces = {}
    for name, parameter in parameters.items():
        if type(parameter.data) is not torch.Tensor or not parameter.numel():
            continue
        first = _owner(places, parameter)
        if first is not None and parameters[first] is not parameter:
            raise UsageError(
                f"'{first}' and '{name}' of {kind} are two parameters in one memory, as after head.weight.data = "
                f"embedding.weight.data. parallel='{parallel}' would untie them. Tie the parameters themselves, before "
                "you make the optimizer: head.weight = embedding.weight."
            )
        places.setdefault(storage_key(parameter), []).append((*_elements(parameter), name))
    return places


def _owner(places: ParameterPlaces, tensor: torch.Tensor) -> str | None:
    """Return the parameter in whose memory a tensor begins, or that begins in its memory."""
    start, end = _elements(tensor)
    found = places.get(storage_key(tensor), ())
    return next((name for first, last, name in found if start < last and first < end), None)


def _alias(what: str, parameter: str, parallel: Parallel) -> UsageError:
    return UsageError(
        f"{what} is a tensor in the memory of the parameter '{parameter}', as weight.detach() is. "
        f"parallel='{parallel}' gives the parameter other memory, or trains it on another rank, so the tensor would "
        "keep its first values. Read the parameter where you need it, or keep a clone()."
    )


def _elements(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first element in its storage, and the one behind the last; of one with gaps only the first."""
    start = int(tensor.storage_offset())
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (extent if extent == tensor.numel() else 1)


def _keeper(value: object) -> str | None:
    """Return what containers, objects and closures lead from to ``value``: an optimizer or a module."""
    seen: set[int] = set()
    found = [value]
    for _ in range(MOST_LINKS):
        found = [one for one in gc.get_referrers(*found) if id(one) not in seen and not _is_scope(one)]
        for kind, name in ((Optimizer, "an optimizer"), (nn.Module, "a module")):
            if any(issubclass(type(one), kind) for one in found):
                return name
        seen |= set(map(id, found))
    return None


def _is_scope(value: object) -> bool:
    """Return whether it has names that a script or a module gave to everything."""
    return isinstance(value, (FrameType, ModuleType)) or (isinstance(value, dict) and "__builtins__" in value)


def check_called(models: Collection[ParallelModel], world_size: int, loss: torch.Tensor) -> None:
    """Warn where ``loss``, of any shape, depends on no prepared model, and so trains each rank's own copy of another.

    Called where no prepared model's forward has run, on several ranks.

    Raises:
        UsageError: no model was prepared, or the loss depends on one that was prepared for evaluation only.
    """
    if not models:
        raise UsageError(
            "backward was called, but no model was prepared. Pass the model to accelerator.prepare()."
        )
    # Gradients of all others are averaged whatever was called, or are refused at the step.
    alone = [model for model in models if type(model) is ParallelModel]
    leaves = set(map(id, autograd.leaves_of(loss)))
    if leaves.isdisjoint(id(p) for model in models for p in model.parameters()):
        warnings.warn(
            "backward got the loss of a model that was not prepared: its gradients are not averaged over the "
            f"{world_size} ranks. Pass that model to accelerator.prepare() if all ranks train it together.",
            stacklevel=4,
        )
    elif not leaves.isdisjoint(id(p) for model in alone for p in model.parameters()):
        raise UsageError(
            "backward got the loss of a model that was prepared for evaluation, so its gradients would not be "
            "averaged over the ranks. Prepare it without evaluation_mode."
        )


def refuse_inside(what: str) -> NoReturn:
    """Raise UsageError for what changes weights or sends gradients, while a model's weights are summoned."""
    raise UsageError(
        f"{what} inside summon_full_params, where weights are whole on each rank and the ranks do not "
        "communicate. Move this call after the block."
    )
