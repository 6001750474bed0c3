"""Runs the example scripts, and reads the numbers that they print."""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch

from lockstep.testing import RANK_VARIABLES

EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent
NUMBER = r"(\d+\.\d+(?:e[+-]\d+)?)"

LOCKSTEP = [str(BIN / "lockstep"), "launch", "--nproc", "2"]


Run = Callable[..., str]


@contextmanager
def beside(path: Path) -> Iterator[None]:
    """Inside, modules of the script's folder can be imported; outside they are gone."""
    names = {file.stem for file in path.parent.glob("*.py")}  # other folders have files of these names too
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(path.parent))
    try:
        yield
    finally:
        sys.path.remove(str(path.parent))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(EXAMPLES)):
                del sys.modules[name]
        sys.modules.update(others)


def run_here(
    script: str,
    arguments: list[str],
    is_launched: bool,
    environment: Mapping[str, str] | None = None,
    dtype: str = "float32",
) -> str:
    """What the script prints in this process, which imported torch before; its new tensors have ``dtype``."""
    torch.set_default_dtype(getattr(torch, dtype))
    path = (EXAMPLES / script).resolve()
    os.environ.update(environment or {})
    sys.argv[:] = [str(path), *arguments]
    for name in () if is_launched else RANK_VARIABLES:
        del os.environ[name]
    with beside(path), redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def matches(pattern: str, text: str) -> list[str]:
    """What the pattern finds in the text, in order; NUMBER in it stands for a number."""
    return [found.group() for found in re.finditer(pattern.replace("NUMBER", NUMBER), text)]


def numbers(pattern: str, text: str) -> list[float]:
    """All values of the pattern's NUMBER in the text, in order."""
    return [float(value) for value in re.findall(pattern.replace("NUMBER", NUMBER), text)]
