"""What the formulas of ``plan`` say of a run, where its start says enough for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config.parallel import Parallel, is_one_group
from lockstep.errors import ConfigError
from lockstep.history.events import RunEvent, configuration
from lockstep.plan.memory import state_bytes
from lockstep.plan.sizes import BYTES, ModelSize
from lockstep.plan.traffic import sent_bytes
from lockstep.words import plain_text


def expected_bytes(start: RunEvent | None) -> float:
    """Bytes that a rank sends in an optimizer step; NaN where no formula is at hand: of models that are split by
    ``tp``, ``pp``, ``cp`` or ``ep``, and where the start does not say how large the model is."""
    started = _Started.of(start)
    if started is None:
        return math.nan
    try:
        as_a_whole = started.is_float32 and is_one_group(
            started.parallel, int(BYTES["fp32"] * started.parameters)
        )
        size = ModelSize(started.parameters, started.trainable, root=started.parameters if as_a_whole else 0)
        return float(
            sent_bytes(size, started.ranks, started.parallel, started.precision, started.micro_batches).total
        )
    except (ConfigError, KeyError):
        return math.nan


def expected_memory(start: RunEvent | None) -> Mapping[str, float]:
    """Bytes of weights, gradients and optimizer state on a rank; empty where no formula is at hand: as above, and of
    parameters that are not float32, and of optimizers that ``lockstep estimate`` does not know."""
    started = _Started.of(start)
    if started is None or start is None or not started.is_float32:
        return {}
    optimizers = {plain_text(name, 40) for name in start.items("optimizers")}
    if len(optimizers) != 1:
        return {}
    try:
        row = state_bytes(
            started.parameters,
            started.ranks,
            started.parallel,
            started.precision,
            optimizers.pop(),
            started.trainable,
        )
    except (ConfigError, KeyError):
        return {}
    return {"weights": row.weights, "gradients": row.gradients, "optimizer": row.optimizer}


@dataclass(frozen=True)
class _Started:
    parameters: int
    is_float32: bool
    trainable: int
    ranks: int
    parallel: Parallel
    precision: str
    micro_batches: int

    @classmethod
    def of(cls, start: RunEvent | None) -> _Started | None:
        """None where the start does not say enough, or the model is split."""
        if start is None:
            return None
        parameters, ranks = start.number("parameters"), start.number("world_size")
        if not (math.isfinite(parameters) and math.isfinite(ranks) and parameters >= 1 and ranks >= 1):
            return None
        trainable = start.number("trainable_parameters")
        settings = {name: value for name, value, _ in configuration(start)}
        accumulated = settings.get("gradient_accumulation_steps", "1")
        micro_batches = int(accumulated) if accumulated.isdecimal() and len(accumulated) < 8 else 1
        try:
            parallel = Parallel.parse(start.text("parallel") or None)
        except (ConfigError, KeyError):
            return None
        if max(parallel.tp, parallel.pp, parallel.cp, parallel.ep) > 1:
            return None
        return cls(
            parameters=int(parameters),
            is_float32=start.items("parameter_dtypes") == ["float32"],
            trainable=int(trainable) if 0 <= trainable <= parameters else int(parameters),
            ranks=int(ranks),
            parallel=parallel,
            precision=start.text("mixed_precision") or settings.get("mixed_precision", "no"),
            micro_batches=max(micro_batches, 1),
        )
