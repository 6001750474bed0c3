"""What is to be checked: a function that makes everything, and how it is trained."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

from lockstep.config.parallel import Parallel
from lockstep.config.settings import SETTINGS
from lockstep.config.values import parse_integer, repr_short
from lockstep.config.world import axes_of
from lockstep.errors import ConfigError, UsageError

MAX_PROCESSES = 64
MAX_STEPS = 1000
LARGEST_SEED = 2**32 - 1


class CaseSettings(TypedDict, total=False):
    """How a case is trained and compared: the arguments of ``check_parity`` beside ``make``; see there."""

    parallel: str | Parallel
    nproc: int
    steps: int
    mixed_precision: str
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    seed: int
    reference: str | Parallel | None


@dataclass(frozen=True)
class ParityCase:
    """What is to be checked, in words that were read; see ``check_parity``."""

    make: Callable[[], object]
    parallel: str
    nproc: int
    steps: int
    mixed_precision: str
    accumulation_steps: int
    max_grad_norm: float | None
    seed: int
    reference: str | None

    @classmethod
    def of(
        cls,
        make: Callable[[], object],
        *,
        parallel: str | Parallel = "ddp",
        nproc: int = 2,
        steps: int = 3,
        mixed_precision: str = "no",
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        seed: int = 0,
        reference: str | Parallel | None = None,
    ) -> ParityCase:
        """Return the case of these arguments.

        Raises:
            ConfigError: a value is not allowed, or ``nproc`` does not fit ``parallel``.
            UsageError: other processes cannot import ``make``.
        """
        _check_importable(make)
        nproc = parse_integer(nproc, "nproc", 1, MAX_PROCESSES)
        words = Parallel.parse(parallel)
        data_ranks = axes_of(words, nproc).data
        if reference is not None:
            reference = Parallel.parse(reference)
            other = axes_of(reference, nproc).data
            if other != data_ranks:
                raise ConfigError(
                    f"parallel='{words}' trains on {data_ranks} batches at a time, but reference='{reference}' "
                    f"on {other}. Compare strategies with the same number of data ranks."
                )
        if max_grad_norm is not None and not (
            isinstance(max_grad_norm, (int, float)) and 0 < max_grad_norm < math.inf
        ):
            raise ConfigError(
                f"max_grad_norm is {repr_short(max_grad_norm)}, but must be a positive number. Pass such a "
                "number, or None to leave gradients as they are."
            )
        return cls(
            make,
            str(words),
            nproc,
            parse_integer(steps, "steps", 1, MAX_STEPS),
            str(SETTINGS["mixed_precision"].kind.read(mixed_precision, "mixed_precision")),
            parse_integer(gradient_accumulation_steps, "gradient_accumulation_steps", 1),
            None if max_grad_norm is None else float(max_grad_norm),
            parse_integer(seed, "seed", 0, LARGEST_SEED),
            None if reference is None else str(reference),
        )

    @property
    def batches_needed(self) -> int:
        """How many batches all ranks together take."""
        return self.steps * self.accumulation_steps * axes_of(Parallel.parse(self.parallel), self.nproc).data

    @property
    def name(self) -> str:
        """That of ``make``, for messages."""
        function = function_of(self.make)
        return f"{function.__module__}.{function.__qualname__}"


def function_of(make: Callable[..., object]) -> Callable[..., object]:
    """Return the function that a ``functools.partial`` calls; of an object its class."""
    while isinstance(make, partial):
        make = make.func
    return make if hasattr(make, "__qualname__") else type(make)


def _check_importable(make: object) -> None:
    if not callable(make):
        raise UsageError(
            f"make is a {type(make).__name__}, but must be a function that returns model, optimizer, batches and loss. "
            "Pass the function itself."
        )
    try:
        pickle.dumps(make)
        return
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    raise UsageError(
        f"make cannot be pickled ({reason}), but the processes of the ranks must import it by its name. Define it with "
        "def at the top level of a module, and pass arguments to it with functools.partial."
    )
