"""The examples in docstrings of public names: which there are, which are missing, and how they run."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

from lockstep import Accelerator
from lockstep.compat.accelerate import GATHERING, names_in
from tests.site import names

NOT_RUN = {
    "lockstep.tracking.AimTracker": "needs the package aim",
    "lockstep.tracking.ClearMLTracker": "needs the package clearml and an account",
    "lockstep.tracking.CometMLTracker": "needs the package comet_ml and an account",
    "lockstep.tracking.DVCLiveTracker": "needs the package dvclive",
    "lockstep.tracking.MLflowTracker": "needs the package mlflow",
    "lockstep.tracking.MLflowTracker.log_figure": "needs the packages mlflow and matplotlib",
    "lockstep.tracking.SwanLabTracker": "needs the package swanlab",
    "lockstep.tracking.TrackioTracker": "needs the package trackio",
    "lockstep.tracking.WandBTracker": "needs the package wandb",
    "lockstep.utils.FP8RecipeKwargs": "needs the package transformer_engine",
    "lockstep.utils.TERecipeKwargs": "needs the package transformer_engine",
}
"""Examples that are only compiled, each with the reason."""

EXAMPLE = re.compile(
    r"^ *Examples:\n(?P<indent> *)```python\n(.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


def example_of(value: object) -> str | None:
    """The example in its docstring."""
    found = EXAMPLE.search(getattr(value, "__doc__", None) or "")
    return None if found is None else textwrap.dedent(found[2])


@functools.cache
def public_values() -> dict[str, Any]:
    """Address -> value of every public function and class, each once, under the first module that has it."""
    paths = [
        f"{module}.{name}" for module in modules() for name in names.public(importlib.import_module(module))
    ]
    errors = importlib.import_module("lockstep.errors")
    paths += [f"lockstep.errors.{name}" for name in names.public(errors) if name.endswith("Error")]
    further = [f"lockstep.utils.{name}" for name in sorted(names_in(GATHERING))]
    found: dict[str, Any] = {}
    behind = [path for paths in names.BEHIND.values() for path in paths]
    for path in [*paths, *names.ALSO_WHOLE, *behind, *further]:
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        is_ours = str(getattr(value, "__module__", "")).startswith("lockstep")
        if callable(value) and is_ours and not any(value is other for other in found.values()):
            found[path] = value
    return found


def modules() -> tuple[str, ...]:
    """The modules that users import from, ours first."""
    return (*names.WHOLE, *names.IN_SENTENCES)


def methods_of(kind: type) -> dict[str, Any]:
    """Public methods of a class, without those that a public base, or one of another package, has."""
    offered = list(filter(inspect.isclass, public_values().values()))
    bases = [
        base for base in kind.__mro__[1:] if base in offered or not base.__module__.startswith("lockstep")
    ]
    known = {name for base in bases for name in dir(base)}
    found = {}
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        is_method = isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value)
        if is_method and not name.startswith("_") and name not in known:
            found[name] = getattr(kind, name)
    return found


def examples(values: dict[str, Any] | None = None) -> dict[str, str]:
    """Address -> example, of functions, classes and their methods."""
    found = {}
    for path, value in (public_values() if values is None else values).items():
        members = methods_of(value) if inspect.isclass(value) else {}
        for address, one in [
            (path, value),
            *((f"{path}.{name}", method) for name, method in members.items()),
        ]:
            text = example_of(one)
            if text is not None:
                found[address] = text
    return found


def missing(values: dict[str, Any] | None = None) -> list[str]:
    """Functions, classes and methods without an example. A method that the example of its class uses has one."""
    found = []
    for path, value in (public_values() if values is None else values).items():
        text = example_of(value)
        if text is None:
            found.append(path)
        for name, method in methods_of(value).items() if inspect.isclass(value) else ():
            is_used = re.search(rf"(?:\.|\bdef ){name}\(", text or "")
            if example_of(method) is None and not is_used:
                found.append(f"{path}.{name}")
    return found


def is_test(text: str) -> bool:
    """Whether an example is a file of tests, as its first line says."""
    return text.startswith("# test_")


def run_one(text: str, folder: Path) -> None:
    """As a script; of a file of tests, all its tests."""
    if not is_test(text):
        exec(compile(text, "<example>", "exec"), {"__name__": "__main__"})
        return
    name = f"test_example_{abs(hash(text))}"
    (folder / f"{name}.py").write_text(text, encoding="utf-8")  # other processes import it
    sys.path.insert(0, str(folder))
    for test in [
        value for key, value in vars(importlib.import_module(name)).items() if key.startswith("test_")
    ]:
        test()


def failures(texts: list[str], folder: str) -> str:
    """Run each by itself, in one process; the tracebacks of those that fail, under their text."""
    os.chdir(folder)
    found = []
    for text in texts:
        Accelerator.forget_all()  # that of the example before, whose plugins a new one would share
        try:
            run_one(text, Path(folder))
        except BaseException:  # pytest's failures are no Exceptions
            found.append(f"{text}\n{traceback.format_exc()}")
    return "\n".join(found)
