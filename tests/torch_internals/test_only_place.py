"""Nobody but ``torch_internals`` names what is private in torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.torch_internals import NEWEST, OLDEST

SOURCE = Path(lockstep.__file__).parent
PROJECT = SOURCE.parents[1]
PRIVATE = re.compile(r"_[A-Za-z]\w*")
ENGINES = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.device_mesh",
    "torch.optim.lr_scheduler",
    "torch.amp",
    "torch.utils.data",
    "torch._subclasses.fake_tensor",
)
# Names of named tuples, of Python, of frames, and of tqdm; below, words of file formats and foreign settings.
OF_OTHERS = {"_fields", "_replace", "_asdict", "_exit", "_getframe", "_fn", "_instances", "_distributed"}
WORDS = {
    "compat/checkpoints/": "names in files that others have written, which are read without importing anything",
    "compat/deepspeed/": "keys and classes of DeepSpeed",
    "compat/fsdp/": "keys of FSDP",
}


def is_private(name: str) -> bool:
    return PRIVATE.fullmatch(name) is not None and name not in OF_OTHERS


def names_of_torch() -> set[str]:
    """Private attributes and functions of the engines, and whatever their code looks up by name."""
    for name in ENGINES:
        importlib.import_module(name)
    names: set[str] = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            names.add(key)
            if issubclass(type(value), type) and value.__module__.partition(".")[0] == "torch":
                names.update(dir(value))
                names.update(getattr(value, "__annotations__", ()))
                for member in vars(value).values():
                    names.update(looked_up(member))
            else:
                names.update(looked_up(value))
    return {name for name in names | core_names() if is_private(name)}


def looked_up(member: Any) -> Iterator[str]:
    if type(member) is property:
        member = member.fget
    elif type(member) in (classmethod, staticmethod):
        member = member.__func__
    if type(member) is types.FunctionType:
        yield from names_in(getattr(inspect.unwrap(member), "__code__", None))


def names_in(code: Any) -> Iterator[str]:
    """Attributes that a function and those inside of it look up."""
    if isinstance(code, types.CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from names_in(constant)


def core_names() -> set[str]:
    """Of what every script holds: a module, a tensor, an optimizer, a schedule, a scaler."""
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    return {n for o in (module, module.weight, optimizer, schedule, scaler) for n in dir(o) if is_private(n)}


def own_names(tree: ast.AST) -> set[str]:
    """Private names that this file gives to something of its own."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def torch_aliases(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(
                (a.asname or a.name).partition(".")[0] for a in node.names if a.name.split(".")[0] == "torch"
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found.update(a.asname or a.name for a in node.names)
    return found


def root_of(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def named_in(path: str, text: str, torch_names: set[str], core: set[str], ours: set[str]) -> list[str]:
    """``path:line: name`` of each private name of torch in a file; ``ours``: names that any of our files gives."""
    tree = ast.parse(text)
    own, aliases = own_names(tree), torch_aliases(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            of_torch = root_of(node) in aliases
            ours_here = node.attr in own or (node.attr in ours and node.attr not in core)
            names = [node.attr] if of_torch or (node.attr in torch_names and not ours_here) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            is_word = any(path.startswith(start) for start in WORDS) or node.value in ours - core
            names = [node.value] if node.value in torch_names and not is_word else []
        else:
            continue
        found += [
            f"{path}:{node.lineno}: {name}"
            for name in names
            if any(is_private(part) for part in name.split("."))
        ]
    return found


@pytest.fixture(scope="module")
def known() -> tuple[set[str], set[str], set[str]]:
    files = [path for path in SOURCE.rglob("*.py") if path.parent.name != "torch_internals"]
    ours = set().union(*(own_names(ast.parse(path.read_text())) for path in files))
    return names_of_torch(), core_names(), ours


def test_only_torch_internals_names_what_is_private_in_torch(known) -> None:
    found: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        relative = str(path.relative_to(SOURCE))
        if not relative.startswith("torch_internals/"):
            found += named_in(relative, path.read_text(), *known)
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import _distributed_c10d",
        "import torch.distributed._functional_collectives",
        "import torch\ntorch._foreach_mul_(tensors, 2)",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "group.fsdp_params[0]._unsharded_param.grad = None",
        "module._parameters['weight']",
        "len(tensor._version)",
        "getattr(model, '_orig_mod', model)",
        "setattr(param, '_sharded_param_data', kept)",
        "optimizer._opt_called = True",
        "import torch\ntorch.ops.aten._log_softmax.default",
    ],
)
def test_a_private_name_elsewhere_is_found(known, line: str) -> None:
    assert named_in("train/new.py", line, *known)


def test_the_bounds_of_torch_are_those_of_the_distribution() -> None:
    [required] = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', (PROJECT / "pyproject.toml").read_text())
    major, minor = NEWEST.split(".")
    assert required == (OLDEST, f"{major}.{int(minor) + 1}")
