"""The pages of public names: a list under the modules from which users import them, and a page for each class."""

from __future__ import annotations

import importlib
import inspect
import pydoc
from enum import Enum
from functools import cached_property
from types import ModuleType

from lockstep import Accelerator
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

INHERITS = ("lockstep.DiLoCo", "lockstep.LocalSGD")

FIVE_CALLS = ("prepare", "backward", "gather_for_metrics", "print")
"""Of ``Accelerator``, which is the first of the five."""

SECTIONS = {
    "TrainingMethods": "Training",
    "BatchMethods": "Batches",
    "CheckpointMethods": "Checkpoints",
    "WeightMethods": "Weights",
    "ProcessControl": "Processes",
    "CollectiveMethods": "Collectives",
    "TrackingMethods": "Tracking and profiling",
    "Accelerator": "The object itself",
    "OptionsView": "Settings",
}
"""The class that defines methods of ``Accelerator`` -> their section of its page."""

HEAD = """# Public names

This page is for people who write a training script and look for a class, a function or an argument. You will find every
public name here, under the module from which you import it, with a link to its arguments.

```python
from lockstep import Accelerator
from lockstep.utils import set_seed
```

Begin with [`Accelerator`](api/Accelerator.md), whose page has the five calls of every script first. What has no link
here is a name of Accelerate's that works as it does there. What is not on this page may change without notice. The
names of Accelerate, and where each is here, are in [Move from Accelerate](../migrating-from-accelerate.md#names).

<!-- Written by python -m tests.site: do not edit. -->
"""

PAGE = """# {title}

This page is for people who use {use}. You will find {what}.

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


def whole(dotted: str, level: int = 2, *options: str) -> str:
    """The directive that shows a name with its arguments and docstring."""
    lines = [f"heading_level: {level}", *options]
    return f"::: {dotted}\n    options:\n" + "".join(f"      {line}\n" for line in lines)


def is_ours(value: object) -> bool:
    """Whether the source has a docstring to show."""
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("lockstep.")


def entries() -> dict[str, dict[str, str]]:
    """Page below ``reference/api`` -> path of each name that it shows whole -> where the source defines that."""
    paths = [f"{name}.{one}" for name in WHOLE for one in public(importlib.import_module(name))]
    found: dict[str, dict[str, str]] = {}
    for path, value in {path: pydoc.locate(path) for path in (*paths, *ALSO_WHOLE)}.items():
        module, _, name = path.rpartition(".")
        if is_ours(value) and value.__module__ != "lockstep.errors":
            page = name if isinstance(value, type) else module.removeprefix("lockstep.")
            found.setdefault(page.replace("lockstep", "functions"), {})[path] = home(value)
    classes = inspect.getmembers(importlib.import_module("lockstep.errors"), inspect.isclass)
    errors = [home(value) for _, value in classes if value.__module__ == "lockstep.errors"]
    behind = {path.rpartition(".")[2]: {path: path} for paths in BEHIND.values() for path in paths}
    return found | {"errors": {path: path for path in sorted(errors, key=str.lower)}} | behind


ENTRIES = entries()
PLACES = {dotted: f"api/{page}.md#{dotted}" for page, shown in ENTRIES.items() for dotted in shown.values()}
"""Where the source defines a name -> its place in the reference."""


def linked(name: str, value: object) -> str:
    """The name as a cell has it, with a link to its place where it has one."""
    place = PLACES.get(home(value)) if is_ours(value) else None
    return f"[`{name}`]({place})" if place else f"`{name}`"


def methods() -> dict[str, list[str]]:
    """Section -> the documented methods and properties of ``Accelerator`` that stand in it."""
    found: dict[str, list[str]] = {title: [] for title in [*SECTIONS.values(), "Properties"]}
    for name in dir(Accelerator):
        value = inspect.getattr_static(Accelerator, name)
        is_property = isinstance(value, property | cached_property)
        is_method = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
        if name.startswith("_") or name in FIVE_CALLS or not (is_property or is_method):
            continue
        owner = next(base for base in Accelerator.__mro__ if name in base.__dict__)
        found["Properties" if is_property else SECTIONS[owner.__name__]].append(name)
    return {title: names for title, names in found.items() if names}


def page_of_accelerator() -> str:
    """The class, its most used methods, and then the others by what they are for."""
    dotted = home(Accelerator)
    members = f"members: [{', '.join(FIVE_CALLS)}]"
    head = PAGE.format(
        title="Accelerator",
        use="`Accelerator`",
        what="the five calls of every script first, then all other methods and properties",
    )
    parts = [head, "## The five calls\n", whole(dotted, 3, members, "inherited_members: true")]
    for title, shown in methods().items():
        parts.append(f"## {title}\n")
        parts += [whole(f"{dotted}.{name}", 3) for name in shown]
    return "\n".join(parts)


def page_of(name: str, shown: dict[str, str]) -> str:
    """A class, the errors, or the functions of a module."""
    module = next(iter(shown)).rpartition(".")[0]
    title, use, what = name, f"`{name}`", "its arguments, attributes and methods"
    if name == "errors":
        title, use, what = "Errors", "scripts that catch errors", "every class of error here"
    elif name[0].islower():
        title, use, what = f"Functions of `{module}`", "functions of this module", "each with its arguments"
    code = f"```python\nfrom {module} import {', '.join(one.rpartition('.')[2] for one in shown)}\n```\n"
    directives = [
        whole(dotted, 2, *([] if path in INHERITS else ["inherited_members: false"]))
        for path, dotted in shown.items()
    ]
    is_imported = name != "errors" and not any(path in paths for path in shown for paths in BEHIND.values())
    return "\n".join([PAGE.format(title=title, use=use, what=what), *[code] * is_imported, *directives])


def pages() -> dict[str, str]:
    """Path below the root -> text."""
    api = {
        name: page_of_accelerator() if name == "Accelerator" else page_of(name, e)
        for name, e in ENTRIES.items()
    }
    return {
        "docs/reference/names.md": page(),
        **{f"docs/reference/api/{name}.md": text for name, text in api.items()},
    }


def navigation() -> str:
    """The lines of mkdocs.yml that list these pages: Accelerator first, classes, then what is no class."""
    names = sorted(ENTRIES, key=lambda name: (name != "Accelerator", name[0].islower(), name.lower()))
    return "".join(f"          - {name}: reference/api/{name}.md\n" for name in names)


def page() -> str:
    parts = [HEAD]
    sections = {name: vars_of(name) for name in (*WHOLE, "lockstep.errors", *IN_SENTENCES)}
    sections |= {
        title: {path.rpartition(".")[2]: pydoc.locate(path) for path in paths}
        for title, paths in BEHIND.items()
    }
    for title, values in sections.items():
        rows = [[linked(one, value), sentence(one, value)] for one, value in values.items()]
        parts += [
            f"## `{title}`\n" if title not in BEHIND else f"## {title}\n",
            table(["name", "what it is"], rows),
        ]
    return "\n".join(parts)


def vars_of(name: str) -> dict[str, object]:
    """The public names of a module with their values; of the errors its own classes."""
    if name == "lockstep.errors":
        return {path.rpartition(".")[2]: pydoc.locate(path) for path in ENTRIES["errors"]}
    module = importlib.import_module(name)
    return {one: getattr(module, one) for one in public(module)}
