"""The versions of torch that are known, and the sentence for any other."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.errors import UsageError

OLDEST, NEWEST = "2.11", "2.15"
"""The oldest and the newest minor version of torch that everything was run on; ``pyproject.toml`` says the same."""

Probe = Callable[[], None]


def unknown(engine: str, does: str) -> UsageError:
    """Return the error for a torch whose ``engine`` does something in a way that is not known."""
    return UsageError(
        f"this torch's {engine} {does} in a way that this version does not know; use torch {OLDEST} to {NEWEST} "
        "or a newer lockstep"
    )


def probed(engine: str, does: str) -> Callable[[Probe], Probe]:
    """Make a probe of a function that raises anything where torch is of unknown shape. It runs once if it passes.

    Raises:
        UsageError: by the probe, from what the function raised: the same on every rank with the same torch.
    """

    def decorate(function: Probe) -> Probe:
        @functools.cache
        @functools.wraps(function)
        def probe() -> None:
            try:
                with undisturbed():
                    function()
            except Exception as error:
                raise unknown(engine, does) from error

        return probe

    return decorate


@contextmanager
def undisturbed() -> Iterator[None]:
    """torch as it is by default: a probe sees nothing that the user has set, and draws none of his random numbers.

    Modes that see every operation are left too: what they cannot do says nothing about torch.
    """
    dtype, numbers = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            _disable_current_modes(),
            warnings.catch_warnings(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):
            warnings.simplefilter("ignore")
            with torch.inference_mode(False), torch.enable_grad():
                yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(numbers)


def expect(holds: bool, what: str) -> None:
    """Raise AssertionError, also under ``python -O``, unless torch behaves as ``what`` says."""
    if not holds:
        raise AssertionError(what)
