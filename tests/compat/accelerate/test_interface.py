"""The table of names against the installed Accelerate: modules, names, arguments, defaults and values of enums."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.compat.accelerate import MODULES, VERSION, NotOffered, Offered, find
from tests.refusals import expect_refusal

DESCRIBE = """
import enum, importlib, inspect, json, pkgutil, types, warnings
warnings.simplefilter("ignore")
import accelerate

def described(value):
    if isinstance(value, enum.EnumMeta):
        return {"values": {name: member.value for name, member in value.__members__.items()}}
    if not callable(value):
        return {}
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {"arguments": [(p.name, p.kind.name, "-" if p.default is p.empty else repr(p.default)) for p in parameters]}

found = {}
names = [m.name for m in pkgutil.walk_packages(accelerate.__path__, "accelerate.", onerror=lambda name: None)]
for name in ["accelerate", *names]:
    if ".test_utils" in name or ".menu" in name:
        continue
    try:
        module = importlib.import_module(name)
    except ImportError:
        continue
    found[name] = {}
    for word in dir(module):
        value = getattr(module, word)
        home = getattr(value, "__module__", None) or ""
        own = home == name or (not home and word.isupper()) or name in ("accelerate", "accelerate.utils")
        if not word.startswith("_") and own and not isinstance(value, types.ModuleType):
            if not home or home.startswith("accelerate"):
                found[name][word] = described(value)
print(json.dumps([accelerate.__version__, found]))
"""

NAMES = Path(__file__).parents[3] / "docs" / "data" / "accelerate_names.yaml"

# What is public by its spelling alone.
LEFTOVERS = {"TYPE_CHECKING"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, Any]]]:
    pytest.importorskip("accelerate")
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE],
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path_factory.mktemp("beside"),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    version, found = json.loads(done.stdout.splitlines()[-1])
    return version, {
        module: {name: said for name, said in names.items() if name not in LEFTOVERS}
        for module, names in found.items()
    }


def test_every_public_name_is_offered_or_has_a_reason(
    installed: tuple[str, dict[str, dict[str, Any]]],
) -> None:
    version, modules = installed
    if version.split(".")[:2] != VERSION.split(".")[:2]:
        pytest.skip(f"Accelerate {version} is installed; the interface is that of {VERSION}")
    unknown = [
        f"{module}.{name}"
        for module, names in modules.items()
        for name in names
        if find(module, name) is None
    ]
    assert unknown == []


def test_a_name_that_programs_import_is_offered_or_belongs_to_another_engine() -> None:
    imported = yaml.safe_load(NAMES.read_text(encoding="utf-8"))["names"]
    assert len(imported) > 140
    for name in imported:
        known = [names[name] for names in MODULES.values() if name in names]
        assert known, name
        reasons = [one.reason for one in known if isinstance(one, NotOffered)]
        assert not any(reason.startswith("no program") for reason in reasons), name


# Arguments or defaults that differ on purpose.
DIFFERENT = {
    "AcceleratedOptimizer": "prepare makes it",
    "AcceleratedScheduler": "prepare makes it",
    "FP8RecipeKwargs": "levels are those of MS-AMP, which is not offered",
    "TERecipeKwargs": "its defaults are those that Accelerate reads from variables",
    "InitProcessGroupKwargs": "the backend follows from the device",
    "notebook_launcher": "a free port, so that two runs do not collide",
    "write_basic_config": "where lockstep config writes",
}


def test_arguments_are_those_of_accelerate(installed: tuple[str, dict[str, dict[str, Any]]]) -> None:
    _, modules = installed
    differing = {}
    for module, names in modules.items():
        for name, said in names.items():
            known = find(module, name)
            if isinstance(known, Offered) and "arguments" in said:
                found = _difference(said["arguments"], known.load())
                if found:
                    differing[name] = found
    unexpected = {name: found for name, found in differing.items() if name not in DIFFERENT}
    assert not unexpected, "\n".join(f"{name}: {found}" for name, found in unexpected.items())
    assert DIFFERENT.keys() <= differing.keys()  # no excuse outlives what it excuses


def _difference(theirs: list[list[str]], ours: Any) -> str:
    """What a call that is right there would find here; empty: nothing."""
    try:
        parameters = list(inspect.signature(ours).parameters.values())
    except (TypeError, ValueError):
        return ""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = {parameter.name: parameter for parameter in parameters}
    for place, (name, kind, default) in enumerate(theirs):
        if kind in ("VAR_POSITIONAL", "VAR_KEYWORD") or name.startswith("_"):
            continue
        parameter = by_name.get(name)
        if parameter is None:
            if takes_any:
                continue
            return f"no argument {name}"
        moved = parameter.kind is parameter.KEYWORD_ONLY or parameters.index(parameter) != place
        if kind == "POSITIONAL_OR_KEYWORD" and moved:
            return f"{name} stands at another place"
        said = "-" if parameter.default is parameter.empty else repr(parameter.default)
        if default != "-" and said != default and " at 0x" not in default and "<factory>" not in default:
            return f"{name}={said} instead of {default}"
    return ""


def test_enums_have_the_values_of_accelerate(installed: tuple[str, dict[str, dict[str, Any]]]) -> None:
    _, modules = installed
    for module, names in modules.items():
        for name, said in names.items():
            known = find(module, name)
            if isinstance(known, Offered) and "values" in said:
                kind = known.load()
                assert isinstance(kind, enum.EnumMeta)
                here = {member: value.value for member, value in kind.__members__.items()}
                assert here.items() >= said["values"].items(), name


def test_reasons_say_what_to_do() -> None:
    for module, names in MODULES.items():
        for name, known in names.items():
            if isinstance(known, NotOffered):
                assert known.reason.endswith(".") and ". " in known.reason, f"{module}.{name}"


def test_lockstep_utils_has_them_as_well() -> None:
    utils = importlib.import_module("lockstep.utils")
    assert utils.convert_bytes(2048) == "2.0 KB"
    expect_refusal(AttributeError, "Megatron-LM", getattr, utils, "MegatronLMPlugin")
    expect_refusal(AttributeError, "'nonsense'", getattr, utils, "nonsense")
    assert "set_module_tensor_to_device" in dir(utils)
    assert Path(importlib.import_module("lockstep.compat.accelerate.names").__file__ or "").exists()
