"""What the source offers and the reference should have: names, commands, options, keys, variables."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache

from lockstep import Accelerator
from lockstep.config import IN_FILES, TOPICS
from tests.site import commands, names
from tests.site.pages import DOCS, ROOT

SOURCE = ROOT / "src" / "lockstep"
READERS = ("config/sources.py", "config/place.py", "config/settings.py", "config/fp8.py", "launch/bare.py")
"""Modules that read the environment."""
VARIABLE = re.compile(r"(?:[A-Z][A-Z0-9]+_[A-Z0-9_]*[A-Z0-9_]|RANK)")
OURS = re.compile(r"(?:LOCKSTEP|ACCELERATE)_[A-Z0-9_]+")
NOT_FOR_USERS = {
    "LOCKSTEP_CONTROL_FILE": "set by the launcher for its workers",
    "LOCKSTEP_CONTROL_SECRET": "set by the launcher for its workers",
    "LOCKSTEP_ORPHAN_WATCH": "set by the launcher for its workers",
    "LOCKSTEP_RESTART": "set by the launcher for its workers",
    "LOCKSTEP_SHARED_CONSOLE": "set by the launcher for its workers",
    "SC_OPEN_MAX": "a name of os.sysconf",
    "OMPI_COMM_WORLD_NODE_RANK_UNUSED": "stands for a variable that this launcher does not set",
    "MV2_COMM_WORLD_NODE_RANK_UNUSED": "stands for a variable that this launcher does not set",
    "PMI_NODE_UNUSED": "stands for a variable that this launcher does not set",
    "AMAX_COMPUTE_ALGO": "the end of a name that begins with ACCELERATE_FP8_",
    "LOCKSTEP_": "a prefix",
    "ACCELERATE_": "a prefix",
    "NCCL_": "a prefix of what lockstep env shows",
    "GLOO_": "a prefix of what lockstep env shows",
    "TORCH_": "a prefix of what lockstep env shows",
    "TORCHINDUCTOR_": "a prefix of what lockstep env shows",
    "PYTORCH_": "a prefix of what lockstep env shows",
    "OMP_": "a prefix of what lockstep env shows",
    "MKL_": "a prefix of what lockstep env shows",
    "CUDA_": "a prefix of what lockstep env shows",
}
"""Words in capitals that no user sets, each with the reason."""
NOT_IMPORTED_BY_USERS = {"accelerator", "distribution", "lazy", "user_call", "words"}
"""Modules at the top of the package whose names have another address, or none."""


def page(name: str) -> str:
    return (DOCS / "reference" / name).read_text(encoding="utf-8")


def strings(source: str) -> Iterator[str]:
    """Every string of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def variables() -> frozenset[str]:
    """Environment variables that users may set: of the readers all, of other modules those with our prefixes."""
    found = {name for settings in TOPICS.values() for one in settings for name in one.variables}
    for path in SOURCE.rglob("*.py"):
        pattern = VARIABLE if path.relative_to(SOURCE).as_posix() in READERS else OURS
        found |= {text for text in strings(path.read_text(encoding="utf-8")) if pattern.fullmatch(text)}
    return frozenset(found - NOT_FOR_USERS.keys())


def undocumented_variables(text: str, there: Iterable[str] | None = None) -> list[str]:
    """Those that the page names neither wholly nor by a pattern such as ``SLURM_*``."""
    named = set(re.findall(r"`([A-Z][A-Z0-9_]*\*?)`", text))
    prefixes = tuple(name[:-1] for name in named if name.endswith("*"))
    return sorted(
        name
        for name in (variables() if there is None else there)
        if name not in named and not (prefixes and name.startswith(prefixes))
    )


def unlisted_modules() -> list[str]:
    """Modules that users can import from and that have no section on the page of names."""
    listed = {name.partition(".")[2] for name in (*names.WHOLE, *names.IN_SENTENCES)} | {"errors"}
    modules = {path.stem for path in SOURCE.glob("[a-z]*.py")}
    return sorted(modules - listed - NOT_IMPORTED_BY_USERS)


def undocumented_names(text: str) -> list[str]:
    """Public names without a line in their module's section."""
    sections = dict(
        zip(*[iter(re.split(r"^## `?([^`\n]+)`?$", text, flags=re.MULTILINE)[1:])] * 2, strict=True)
    )
    found = []
    for name in (*names.WHOLE, *names.IN_SENTENCES, "lockstep.errors"):
        shown = set(re.findall(r"^\| \[?`(\w+)`", sections.get(name, ""), re.MULTILINE))
        module = importlib.import_module(name)
        public = [one for one in names.public(module) if name != "lockstep.errors" or one.endswith("Error")]
        found += [f"{name}.{one}" for one in public if one not in shown]
    return found


def methods_without_a_sentence() -> list[str]:
    """Of ``Accelerator``: the reference shows what has a docstring."""
    found = []
    for name in dir(Accelerator):
        value = inspect.getattr_static(Accelerator, name)
        if not name.startswith("_") and inspect.isfunction(value) and not value.__doc__:
            found.append(name)
    return found


def undocumented_options(text: str) -> list[str]:
    """Commands without a section, and options that their section does not have."""
    found = []
    for words, command in commands.walk():
        head = re.search(rf"^#+ lockstep {words}$", text, re.MULTILINE)
        if head is None:
            found.append(words)
            continue
        section = re.split(r"^##+ ", text[head.end() :], flags=re.MULTILINE)[0]
        if words not in commands.ELSEWHERE:
            options = [option for one in commands.options_of(command) for option in one.opts]
            found += [f"{words} {option}" for option in options if f"`{option}`" not in section]
    return found


def undocumented_keys(text: str) -> list[str]:
    """Keys of a configuration file that the page does not name."""
    return sorted(key for key in IN_FILES if f"`{key}`" not in text)
