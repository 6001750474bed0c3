"""Each example in a docstring runs as it stands there: as a script of one process, and on two ranks."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep import nn, utils
from tests.warm_interpreter import WarmInterpreter

FIRST_USED = {
    "Accelerator",
    "Accelerator.accumulate",
    "Accelerator.autocast",
    "Accelerator.backward",
    "Accelerator.clip_grad_norm_",
    "Accelerator.gather",
    "Accelerator.gather_for_metrics",
    "Accelerator.load_state",
    "Accelerator.log",
    "Accelerator.main_process_first",
    "Accelerator.maybe_context_parallel",
    "Accelerator.no_sync",
    "Accelerator.on_main_process",
    "Accelerator.prepare",
    "Accelerator.print",
    "Accelerator.reduce",
    "Accelerator.save_model",
    "Accelerator.save_state",
    "Accelerator.split_between_processes",
    "Accelerator.train_step",
    "Accelerator.unwrap_model",
    "MixtureOfExperts",
    "PartialState",
    "dispatch_model",
    "find_executable_batch_size",
    "get_logger",
    "init_empty_weights",
    "load_checkpoint_and_dispatch",
    "notebook_launcher",
    "set_seed",
    "skip_first_batches",
}
"""The public names that scripts use first: they have an example."""
ROOT = Path(__file__).parents[1]
STARTS_PROCESSES = {"notebook_launcher"}
"""What cannot run in a process that is one of several already."""
EXAMPLE = re.compile(
    r"^ *Examples:\n(?P<indent> *)```python\n(.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.test_docstring_examples import failures
sys.exit(failures({examples!r}, {folder!r}) or 0)
"""


def examples() -> dict[str, str]:
    """The example of each public name that has one: of the package, of two modules, and of their classes' methods."""
    found = {name: getattr(module, name) for module in (utils, nn, lockstep) for name in public(module)}
    for name, value in list(found.items()):
        if inspect.isclass(value):
            found |= {f"{name}.{member}": getattr(value, member) for member in public(value)}
    matches = {name: EXAMPLE.search(getattr(value, "__doc__", None) or "") for name, value in found.items()}
    return {name: textwrap.dedent(match[2]) for name, match in matches.items() if match is not None}


def public(value: Any) -> list[str]:
    return [name for name in dir(value) if not name.startswith("_")]


EXAMPLES = examples()


def failures(texts: list[str], folder: str) -> str:
    """Run each by itself, in one process; the tracebacks of those that fail, under their text."""
    os.chdir(folder)
    found = []
    for text in texts:
        try:
            exec(compile(text, "<example>", "exec"), {"__name__": "__main__"})
        except Exception:
            found.append(f"{text}\n{traceback.format_exc()}")
    return "\n".join(found)


def test_what_people_use_first_has_an_example() -> None:
    assert len(FIRST_USED) >= 20
    assert FIRST_USED - set(EXAMPLES) == set()


def test_every_example_runs_as_a_script(warm_interpreter: WarmInterpreter, tmp_path: Path) -> None:
    texts = list(dict.fromkeys(EXAMPLES.values()))
    script = SCRIPT.format(root=str(ROOT), examples=texts, folder=str(tmp_path))
    (tmp_path / "examples.py").write_text(script)
    exit_code, output = warm_interpreter.run(tmp_path / "examples.py")
    assert exit_code == 0, output


def test_every_example_runs_on_two_ranks(run_distributed: Callable[..., list[str]], tmp_path: Path) -> None:
    texts = {text for name, text in EXAMPLES.items() if name not in STARTS_PROCESSES}
    assert run_distributed(failures, 2, sorted(texts), str(tmp_path)) == ["", ""]


def test_an_example_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # and back again afterwards
    assert "assert 1 == 2\n" in failures(["value = 1\n", "assert 1 == 2\n"], str(tmp_path))
