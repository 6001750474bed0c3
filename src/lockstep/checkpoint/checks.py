"""Whether decoded states can be what objects saved, asked before any object is given one.

An object's own ``load_state_dict`` mostly takes what it gets: torch's schedulers even let a state replace methods.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import CheckpointError
from lockstep.torch_internals.optim import GROWTH_TRACKER

NUMPY_WORDS = 624


def check_scheduler(saved: Any, scheduler: Any, what: str) -> None:
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
                f"{what} would replace {', '.join(replaced[:3])} of a {type(scheduler).__name__}, which is no part of "
                "its state. Load another checkpoint."
            )


def check_scaler(saved: Any, scaler: Any, what: str) -> None:
    """Raise CheckpointError if a loss scaler's saved state lacks a value, or has another kind of value."""
    present = getattr(scaler, "scaler", scaler).state_dict()
    check_kinds(saved, present, present.keys(), what)
    for key in present.keys() & {"scale", "growth_factor", "backoff_factor"}:
        if saved[key] is None or not 0 < float(saved[key]) < math.inf:
            raise CheckpointError(f"{what}.{key} is saved as {saved[key]!r}. Load another checkpoint.")
    for key in present.keys() & {"growth_interval", GROWTH_TRACKER}:
        if type(saved[key]) is not int or saved[key] < 0:
            raise CheckpointError(f"{what}.{key} is saved as {saved[key]!r}. Load another checkpoint.")


def check_kinds(saved: Any, present: Mapping[str, Any], needed: Set[str], what: str) -> None:
    """Raise CheckpointError unless ``saved`` has the ``needed`` keys, and values of the kinds of ``present``."""
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{what} is saved as a {type(saved).__name__}. Load another checkpoint.")
    missing = sorted(needed - saved.keys())
    if missing:
        raise CheckpointError(
            f"{what} was saved without {', '.join(missing[:3])}. Prepare what was saved, or load another checkpoint."
        )
    for key in saved.keys() & present.keys():
        check_kind(saved[key], present[key], f"{what}.{key}")


def check_kind(saved: Any, present: Any, what: str) -> None:
    """Raise CheckpointError if a number stands for text, a list for a number, and so on; None may become anything."""
    fits = True
    if isinstance(present, bool):  # choices that may be left to torch
        fits = saved is None or _is_number(saved)
    elif _is_number(present):
        fits = _is_number(saved)
    elif isinstance(present, str):
        fits = isinstance(saved, str)
    elif isinstance(present, (list, tuple)):
        fits = isinstance(saved, (list, tuple))
        if fits and present and all(map(_is_number, present)):
            fits = len(saved) == len(present) and all(map(_is_number, saved))
    elif isinstance(present, Mapping):
        fits = isinstance(saved, Mapping)
    if not fits:
        raise CheckpointError(
            f"{what} is saved as {str(saved)[:80]!r}, but is {str(present)[:80]!r} here. Prepare what was saved, or "
            "load another checkpoint."
        )


def check_buffers(buffers: Any, present: Mapping[str, Any], what: str) -> None:
    """Raise CheckpointError unless ``buffers`` are tensors of the shapes that those of the same names have."""
    if not isinstance(buffers, Mapping):
        raise CheckpointError(f"{what} has no buffers by name. Load another checkpoint.")
    for name in buffers.keys() & present.keys():
        if not isinstance(buffers[name], torch.Tensor) or buffers[name].shape != present[name].shape:
            raise CheckpointError(
                f"{what} has {str(buffers[name])[:80]!r} for {name} of shape {tuple(present[name].shape)}. Load "
                "another checkpoint."
            )


def check_rng(state: Any, what: str) -> None:
    """Raise CheckpointError unless ``set_rng_state`` will take the state: tried on generators of our own."""
    try:
        words = state["numpy.words"].numpy()
        position = state["numpy.position"]
        if type(position) is not int or type(state["numpy.has_gauss"]) is not int:
            raise TypeError("NumPy counts in whole numbers")
        if not 0 <= position <= NUMPY_WORDS or words.shape != (NUMPY_WORDS,):
            # NumPy would read outside of its words.
            raise ValueError(f"NumPy's words are {words.shape[0]}, of which the next is number {position}")
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
            f"{what} has states of random number generators that none can have ({type(error).__name__}: {error}). Load "
            "another checkpoint."
        ) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
