"""Whether decoded states can be what objects saved, asked before any object is given one.

An object's own ``load_state_dict`` mostly takes what it gets: torch's schedulers even let a state replace methods.
"""

from __future__ import annotations

import copy
import math
import random
import sys
import warnings
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.checkpoint.contents import Stateful
from lockstep.checkpoint.format.codec import Document
from lockstep.comm.tree import StateDict
from lockstep.errors import CheckpointError
from lockstep.torch_internals.optim import GROWTH_TRACKER

NUMPY_WORDS = 624


def check_scheduler(saved: object, scheduler: object, what: str) -> None:
    """Raise CheckpointError if a scheduler's saved state would replace methods of it, or has other kinds of values."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(scheduler, LRScheduler):
        return
    if type(scheduler).__module__.startswith("torch."):
        # Other versions of torch have other attributes, but those that count have this.
        present = scheduler.state_dict()
        check_kinds(saved, present, {"last_epoch"} & present.keys(), what)
    if isinstance(saved, Mapping):
        own = scheduler.state_dict()
        replaced = sorted(str(key) for key in saved if key not in own and hasattr(scheduler, str(key)))
        if replaced:
            raise CheckpointError(
                f"{what} would replace {', '.join(replaced[:3])} of a {type(scheduler).__name__}, which are not "
                "part of its state. Load another checkpoint."
            )


def check_scaler(saved: Document, scaler: Stateful, what: str) -> None:
    """Raise CheckpointError if a loss scaler's saved state lacks a value, or has another kind of value."""
    present = getattr(scaler, "scaler", scaler).state_dict()
    check_kinds(saved, present, present.keys(), what)
    # NaN fails a chained comparison too.
    for key in present.keys() & {"scale", "growth_factor", "backoff_factor"}:
        if saved[key] is None or not 0 < float(saved[key]) < math.inf:
            raise CheckpointError(f"{what}.{key} is saved as {saved[key]!r}. Load another checkpoint.")
    for key in present.keys() & {"growth_interval", GROWTH_TRACKER}:
        # By type and not by isinstance: True is an int.
        if type(saved[key]) is not int or saved[key] < 0:
            raise CheckpointError(f"{what}.{key} is saved as {saved[key]!r}. Load another checkpoint.")


def check_kinds(saved: object, present: Mapping[str, object], needed: Set[str], what: str) -> None:
    """Raise CheckpointError unless ``saved`` has the ``needed`` keys, and values of the kinds of ``present``."""
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            f"{what} is saved as a {type(saved).__name__} instead of a dict. Load another checkpoint."
        )
    missing = sorted(needed - saved.keys())
    if missing:
        raise CheckpointError(
            f"{what} was saved without {', '.join(missing[:3])}. Prepare what was saved, or load another checkpoint."
        )
    for key in saved.keys() & present.keys():
        check_kind(saved[key], present[key], f"{what}.{key}")


def check_kind(saved: Any, present: object, what: str) -> None:
    """Raise CheckpointError if a number stands for text, a list for a number, and so on; None may become anything."""
    fits = True
    # None leaves the choice to torch.
    if isinstance(present, bool):
        fits = saved is None or _is_number(saved)
    elif _is_number(present):
        fits = _is_number(saved)
    elif isinstance(present, str):
        fits = isinstance(saved, str)
    elif isinstance(present, (list, tuple)):
        fits = isinstance(saved, (list, tuple))
        # Such as betas: an optimizer unpacks a fixed number of them.
        if fits and present and all(map(_is_number, present)):
            fits = len(saved) == len(present) and all(map(_is_number, saved))
    elif isinstance(present, Mapping):
        fits = isinstance(saved, Mapping)
    if not fits:
        raise CheckpointError(
            f"{what} is saved as {str(saved)[:80]!r}, but is {str(present)[:80]!r} here. Prepare what was saved, or "
            "load another checkpoint."
        )


def check_buffers(buffers: object, present: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise CheckpointError unless ``buffers`` are tensors of the shapes that those of the same names have."""
    if not isinstance(buffers, Mapping):
        raise CheckpointError(
            f"{what} should have a dict of buffers by name, but has a {type(buffers).__name__}. Load another "
            "checkpoint."
        )
    for name in buffers.keys() & present.keys():
        if not isinstance(buffers[name], torch.Tensor) or buffers[name].shape != present[name].shape:
            raise CheckpointError(
                f"{what} has {str(buffers[name])[:80]!r} for the buffer {name}, whose shape is "
                f"{tuple(present[name].shape)}. Load another checkpoint."
            )


def check_rng(state: Document, what: str) -> None:
    """Raise CheckpointError unless ``set_rng_state`` will take the state: tried on generators of our own."""
    try:
        words = state["numpy.words"].numpy()
        position = state["numpy.position"]
        if type(position) is not int or type(state["numpy.has_gauss"]) is not int:
            raise TypeError("NumPy's position and has_gauss must be whole numbers")
        if not 0 <= position <= NUMPY_WORDS or words.shape != (NUMPY_WORDS,):
            # NumPy would read outside of its words.
            raise ValueError(f"NumPy has {words.shape[0]} words and position {position}")
        for key in ("numpy.gauss", "python.gauss"):
            if state[key] is not None and not isinstance(state[key], float):
                raise TypeError(f"{key} is no number")
        random.Random().setstate(
            (state["python.version"], tuple(state["python.words"].tolist()), state["python.gauss"])
        )
        np.random.RandomState().set_state(
            {
                "bit_generator": state["numpy.generator"],
                "state": {"key": words, "pos": position},
                "has_gauss": state["numpy.has_gauss"],
                "gauss": state["numpy.gauss"],
            }
        )
        torch.Generator().set_state(state["torch"])
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise CheckpointError(
            f"{what} has states of random number generators that are not valid ({type(error).__name__}: "
            f"{error}). Load another checkpoint."
        ) from error


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


SMALL = (2, 3)
"""The shape of the parameters that are stepped instead."""

CheckedGroup = tuple[Mapping[str, object], list[tuple[str, Mapping[str, object], tuple[int, ...]]]]
"""Options of a group, and of each of its parameters the name, the saved state and the shape."""


def keeps_shapes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each tensor of its state is a number or has the shape of its parameter."""
    kind = type(_inner(optimizer))
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in ("Adafactor", "LBFGS")


def try_optimizer(optimizer: torch.optim.Optimizer, groups: list[CheckedGroup], what: str) -> None:
    """Step an optimizer of torch's with these states, on small parameters.

    Tensors without values (on the meta device) stand for those with the shape of their parameter; others are taken
    with their values. States that are alike are tried once.

    Raises:
        CheckpointError: it does not step, or gives what is no number.
    """
    optimizer = _inner(optimizer)
    if not keeps_shapes(optimizer) or type(optimizer).__name__ == "SparseAdam":
        return
    dtype = next((p.dtype for g in optimizer.param_groups for p in g["params"]), torch.float32)
    if not dtype.is_floating_point or dtype.itemsize < 4:
        dtype = torch.float32
    names, given, saved = _on_small_parameters(groups, dtype)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            probe = _class_of_torch(optimizer)(given)
            # load_state_dict may keep the tensors that it gets, and the probe's steps would write to them.
            probe.load_state_dict(copy.deepcopy(saved))
            flat = [p for group in given for p in group["params"]]
            for parameter in flat:
                parameter.grad = torch.full_like(parameter, 0.5)
            # What is no number yet may be one step later.
            for _ in range(3):
                probe.step()
    except Exception as error:
        raise CheckpointError(
            f"{what} cannot be stepped with: {type(optimizer).__name__} fails with {type(error).__name__} "
            f"({str(error).splitlines()[0][:160] if str(error) else ''}). Load another checkpoint, or prepare the "
            "optimizer of the run that saved it."
        ) from error
    for name, parameter in zip(names, flat, strict=True):
        if not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(
                f"{what}: a step with the saved state of {name} and the options of its group gives NaN or "
                "infinity. Load another checkpoint."
            )


def _on_small_parameters(
    groups: list[CheckedGroup], dtype: torch.dtype
) -> tuple[list[str], list[StateDict], StateDict]:
    """Return names, groups and state dict of small parameters, one for each kind of state; groups without any are left
    out."""
    names: list[str] = []
    state: dict[int, dict[str, object]] = {}
    given: list[StateDict] = []
    saved_groups: list[dict[str, object]] = []
    for options, members in groups:
        distinct = _distinct(members)
        if not distinct:
            continue
        numbers = range(len(names), len(names) + len(distinct))
        names += [name for name, _ in distinct]
        state.update({n: dict(values) for n, (_, values) in zip(numbers, distinct, strict=True) if values})
        given.append({"params": [torch.nn.Parameter(torch.ones(SMALL, dtype=dtype)) for _ in distinct]})
        # capturable wants tensors on an accelerator, but the probe's parameters are on the CPU.
        plain = {key: False for key in ("foreach", "fused", "capturable", "differentiable") if key in options}
        saved_groups.append({**options, **plain, "params": list(numbers)})
    return names, given, {"state": state, "param_groups": saved_groups}


def _distinct(
    members: list[tuple[str, Mapping[str, object], tuple[int, ...]]],
) -> list[tuple[str, Mapping[str, object]]]:
    """Return the first name of each kind of state, and that state, as of a small parameter."""
    alike: dict[str, tuple[str, Mapping[str, object]]] = {}
    for name, saved_state, shape in members:
        small = {key: _small(value, shape) for key, value in saved_state.items()}
        alike.setdefault(repr(sorted((str(k), _described(v)) for k, v in small.items())), (name, small))
    return list(alike.values())


def _class_of_torch(optimizer: torch.optim.Optimizer) -> type:
    """Return the class that can be made anew: that of an offloaded step is a subclass with the same name and
    module.
    """
    return next(
        kind
        for kind in type(optimizer).__mro__
        if kind.__module__.startswith("torch.optim.")
        and getattr(sys.modules[kind.__module__], kind.__name__, None) is kind
    )


def _small(value: object, shape: tuple[int, ...]) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:
        return torch.ones(SMALL if tuple(value.shape) == shape else value.shape, dtype=value.dtype)
    return value.detach().cpu()


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.item() if value.numel() == 1 else ''}"
    return repr(value)[:200]


def try_scheduler(scheduler: object, saved: Document, what: str) -> None:
    """Step a copy of one of torch's schedulers once with this state.

    Raises:
        CheckpointError: it does not step, or gives a learning rate that is no number.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(scheduler, LRScheduler) or not type(scheduler).__module__.startswith("torch."):
        return
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": []}
        for group in scheduler.optimizer.param_groups
    ]
    for group in groups:
        group["params"] = [torch.nn.Parameter(torch.zeros(1))]
    # A step of the copy sets learning rates: it must be those of an optimizer that nobody uses.
    stand_in = torch.optim.SGD([{"params": group["params"]} for group in groups], lr=0.0)
    for mine, group in zip(stand_in.param_groups, groups, strict=True):
        mine.update(group)
    try:
        probe = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
    except Exception:
        # It holds what cannot be copied.
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probe.load_state_dict(copy.deepcopy(saved))
            probe.step(1.0) if isinstance(probe, ReduceLROnPlateau) else probe.step()
    except ValueError:
        # Some schedules end: OneCycleLR has no step behind its last.
        return
    except Exception as error:
        raise CheckpointError(
            f"{what} cannot be stepped with: {type(scheduler).__name__} fails with {type(error).__name__} "
            f"({str(error)[:160]}). Load another checkpoint, or prepare the scheduler of the run that saved it."
        ) from error
    rates = [group["lr"] for group in stand_in.param_groups]
    if not all(_is_finite(rate) for rate in rates):
        raise CheckpointError(
            f"{what} gives the learning rates {str(rates)[:80]}, which are not all finite numbers. Load another "
            "checkpoint."
        )


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)
