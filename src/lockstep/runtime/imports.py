"""Writes down which modules a worker has imported, for the process that will take its place."""

from __future__ import annotations

import json
import os
import sys

from lockstep.config.sources import environment_digests
from lockstep.runtime.clock import StepClock


def record_imports(clock: StepClock, path: str) -> None:
    """Write the modules into the file that the launcher has named, after each step that imported some."""
    count = 0

    def step_ends() -> None:
        nonlocal count
        if len(sys.modules) != count:
            count = len(sys.modules)
            _write(path)

    clock.at_step.append(step_ends)


def _write(path: str) -> None:
    """In the order in which they were imported: a module comes after those that need it to be there first."""
    modules = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        # What an import by this name finds again: no built-in module, no alias, not ``__main__``.
        if spec is not None and spec.has_location and spec.name == name:
            modules.append(name)
    record = {"modules": modules, "environment": environment_digests()}
    part = f"{path}.part"
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(part, path)
    except OSError:
        # Without it the next round starts as the first one did.
        return
