"""What a rank sends in a step, by the formulas of ``plan.traffic``, where the run's start says enough for them."""

from __future__ import annotations

import math

from lockstep.config.parallel import Parallel
from lockstep.errors import ConfigError
from lockstep.history.events import RunEvent
from lockstep.plan.sizes import ModelSize
from lockstep.plan.traffic import sent_bytes
from lockstep.report.started import configuration


def expected_bytes(start: RunEvent | None) -> float:
    """Bytes that a rank sends in an optimizer step; NaN where no formula is at hand: of models that are split by
    ``tp``, ``pp``, ``cp`` or ``ep``, and where the start does not say how large the model is."""
    if start is None:
        return math.nan
    parameters, ranks = start.number("parameters"), start.number("world_size")
    if not (math.isfinite(parameters) and math.isfinite(ranks) and parameters >= 1 and ranks >= 1):
        return math.nan
    said = {name: value for name, value, _ in configuration(start)}
    precision = start.text("mixed_precision") or said.get("mixed_precision", "no")
    accumulated = said.get("gradient_accumulation_steps", "1")
    try:
        parallel = Parallel.parse(start.text("parallel") or None)
        if max(parallel.tp, parallel.pp, parallel.cp, parallel.ep) > 1:
            return math.nan
        size = ModelSize(int(parameters), int(parameters))
        micro_batches = int(accumulated) if accumulated.isdecimal() and len(accumulated) < 8 else 1
        return float(sent_bytes(size, int(ranks), parallel, precision, max(micro_batches, 1)).total)
    except (ConfigError, KeyError):
        return math.nan
