"""Each public function, class and method has an example, which runs as it stands there: alone, and on two ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docstring_examples import NOT_RUN, examples, failures, is_test, missing, public_values
from tests.warm_interpreter import WarmInterpreter

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.docstring_examples import failures
sys.exit(failures({examples!r}, {folder!r}) or 0)
"""
EXAMPLES = examples()
RUN = {name: text for name, text in EXAMPLES.items() if name not in NOT_RUN}


def is_for_several_ranks(text: str) -> bool:
    """Whether an example asks for its rank, and does not start processes itself."""
    return (
        bool(re.search(r"\b(?:Accelerator|PartialState)\(", text))
        and "_launcher" not in text
        and not is_test(text)
    )


def test_every_public_function_class_and_method_has_an_example() -> None:
    assert missing() == []
    assert len(public_values()) > 200


def test_what_is_not_run_has_an_example_and_a_reason() -> None:
    assert NOT_RUN.keys() <= EXAMPLES.keys()
    assert all(NOT_RUN.values())
    for name in NOT_RUN:
        compile(EXAMPLES[name], name, "exec")


def test_every_example_prints_or_asserts_or_calls_something() -> None:
    for name, text in EXAMPLES.items():
        assert 2 <= len(text.splitlines()) <= 26, name
        assert re.search(r"^ *(?:assert|print|raise|with|@)\b|\w\(", text, re.MULTILINE), name


def test_every_example_runs_as_a_script(warm_interpreter: WarmInterpreter, tmp_path: Path) -> None:
    texts = list(dict.fromkeys(text for text in RUN.values() if not is_test(text)))
    script = SCRIPT.format(root=str(ROOT), examples=texts, folder=str(tmp_path))
    (tmp_path / "examples.py").write_text(script)
    exit_code, output = warm_interpreter.run(tmp_path / "examples.py", limit_s=170)
    assert exit_code == 0, output


@pytest.mark.usefixtures("worker_pool")  # whose processes theirs are forked from, with torch
def test_every_example_that_is_a_file_of_tests_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # and back again afterwards
    monkeypatch.syspath_prepend(tmp_path)
    texts = [text for text in RUN.values() if is_test(text)]
    assert len(texts) == 6
    assert failures(texts, str(tmp_path)) == ""


def test_every_example_runs_on_two_ranks(run_distributed: Callable[..., list[str]], tmp_path: Path) -> None:
    texts = sorted({text for text in RUN.values() if is_for_several_ranks(text)})
    assert len(texts) > 90
    assert run_distributed(failures, 2, texts, str(tmp_path)) == ["", ""]


def test_an_example_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # and back again afterwards
    assert "assert 1 == 2\n" in failures(["value = 1\n", "assert 1 == 2\n"], str(tmp_path))
