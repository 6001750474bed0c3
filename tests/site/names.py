"""The page of public names, under the modules from which users import them."""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from types import ModuleType

from tests.site.pages import cell, table

WHOLE = ("lockstep", "lockstep.nn", "lockstep.testing")
"""Modules whose names are shown with their arguments and docstrings."""

IN_SENTENCES = (
    "lockstep.utils",
    "lockstep.big_modeling",
    "lockstep.hooks",
    "lockstep.data_loader",
    "lockstep.inference",
    "lockstep.launchers",
    "lockstep.local_sgd",
    "lockstep.logging",
    "lockstep.optimizer",
    "lockstep.parallelism_config",
    "lockstep.scheduler",
    "lockstep.state",
    "lockstep.tracking",
)
"""Modules with the names and meanings of Accelerate's; each name with its first sentence."""

ALSO_WHOLE = (
    "lockstep.utils.gather",
    "lockstep.utils.gather_object",
    "lockstep.utils.broadcast",
    "lockstep.utils.broadcast_object_list",
    "lockstep.utils.reduce",
    "lockstep.utils.pad_across_processes",
    "lockstep.utils.release_memory",
    "lockstep.utils.GatheredParameters",
    "lockstep.utils.AORecipeKwargs",
    "lockstep.utils.FullyShardedDataParallelPlugin",
    "lockstep.utils.DeepSpeedPlugin",
    "lockstep.utils.DummyOptim",
    "lockstep.utils.DummyScheduler",
    "lockstep.utils.Parallel",
    "lockstep.inference.prepare_pippy",
    "lockstep.tracking.GeneralTracker",
)
"""Names of these modules that are shown whole."""

BEHIND = {
    "What `prepare` returns": (
        "lockstep.data.loader.PreparedLoader",
        "lockstep.train.optimizer.PreparedOptimizer",
        "lockstep.train.scheduler.PreparedScheduler",
    ),
    "What methods of `Accelerator` return": (
        "lockstep.comm.counter.CommCounter",
        "lockstep.observe.state_bytes.StateBytes",
        "lockstep.parallel.asynchronous.stale.StalenessReport",
    ),
}
"""Objects that users get, and make none of."""

INHERITS = ("lockstep.Accelerator", "lockstep.DiLoCo", "lockstep.LocalSGD")

HEAD = """# Public names

This page is for people who write a training script and look for a class, a function or an argument. You will find every
public name here, under the module from which you import it.

```python
from lockstep import Accelerator
from lockstep.utils import set_seed
```

What is not on this page may change without notice. The names of Accelerate, and where each of them is here, are in
[Move from Accelerate](../migrating-from-accelerate.md#names).

<!-- Written by python -m tests.site: do not edit. -->
"""


def public(module: ModuleType) -> list[str]:
    """The names that a module offers, in their order; ``utils`` lists its own by ``dir``."""
    names = getattr(module, "__all__", None) or [
        name
        for name in dir(module)
        if not name.startswith("_") and getattr(module, name).__class__ is not ModuleType
    ]
    return sorted((name for name in names if not name.startswith("__")), key=str.lower)


def home(value: object) -> str:
    """Where the source defines it."""
    return f"{value.__module__}.{value.__qualname__}"  # type: ignore[attr-defined]


def sentence(name: str, value: object) -> str:
    """The first sentence of its docstring; of a value what it is."""
    if not (inspect.isclass(value) or callable(value)):
        return f"a value of type `{type(value).__name__}`"
    text = value.__doc__ or ""
    if not text and name.startswith("is_") and name.endswith("_available"):
        return f"Whether {name[3 : -len('_available')]} can be used here."
    if not text and isinstance(value, type) and issubclass(value, Enum):
        return "One of " + ", ".join(f"`{member.value}`" for member in value) + "."
    first = cell(text.split("\n\n")[0]).replace("``", "`")
    return first if len(first) < 240 else first[:237] + "..."


def whole(path: str, dotted: str) -> str:
    options = "" if path in INHERITS else "    options:\n      inherited_members: false\n"
    return f"::: {dotted}\n{options}"


def is_ours(value: object) -> bool:
    """Whether the source has a docstring to show."""
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("lockstep.")


def page() -> str:
    parts = [HEAD]
    for name in WHOLE:
        module = importlib.import_module(name)
        parts.append(f"## `{name}`\n")
        values = {one: getattr(module, one) for one in public(module)}
        parts += [whole(f"{name}.{one}", home(value)) for one, value in values.items() if is_ours(value)]
        rest = [[f"`{one}`", sentence(one, value)] for one, value in values.items() if not is_ours(value)]
        if rest:
            parts.append(table(["name", "what it is"], rest))
    errors = importlib.import_module("lockstep.errors")
    parts.append("## `lockstep.errors`\n")
    parts += [
        whole("", f"lockstep.errors.{one}")
        for one in public(errors)
        if inspect.isclass(getattr(errors, one)) and getattr(errors, one).__module__ == "lockstep.errors"
    ]
    for name in IN_SENTENCES:
        module = importlib.import_module(name)
        values = {one: getattr(module, one) for one in public(module)}
        parts.append(f"## `{name}`\n")
        parts.append(
            table(["name", "what it is"], [[f"`{one}`", sentence(one, v)] for one, v in values.items()])
        )
        parts += [
            whole(path, home(getattr(module, path.rpartition(".")[2])))
            for path in ALSO_WHOLE
            if path.rpartition(".")[0] == name
        ]
    for title, paths in BEHIND.items():
        parts.append(f"## {title}\n")
        parts += [whole("", path) for path in paths]
    return "\n".join(parts)
