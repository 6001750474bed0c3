"""Each lesson computes what one process does and sends what its formula says; each page shows the lesson's own code.

The lessons run in workers that are there already. That the engine does the same: test_from_scratch_engine.py.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from lockstep.testing import WorkerPool

ROOT = Path(__file__).parents[2]
LESSONS = ROOT / "examples" / "from_scratch"
PAGES = ROOT / "docs" / "from_scratch"
NAMES = sorted(path.stem for path in LESSONS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


def lesson(name: str) -> ModuleType:
    """The module of a lesson, which imports others of its folder."""
    if str(LESSONS) not in sys.path:
        sys.path.insert(0, str(LESSONS))
    return importlib.import_module(name)


def processes_of(name: str) -> int:
    """On how many processes the lesson runs when it is started."""
    (number,) = re.findall(r"^    run\(demo, processes=(\d)\)$", (LESSONS / f"{name}.py").read_text(), re.M)
    return int(number)


def run_lesson(name: str) -> tuple[list[str], str]:
    """On one process: what did not hold, and the table."""
    dist.init_process_group("gloo")
    world = lesson("world")
    checks = lesson(name).demo()
    return [str(check) for check in checks if not check.holds], world.table(checks)


@pytest.fixture(scope="module")
def tables(worker_pool: WorkerPool) -> dict[str, str]:
    """The table of each lesson on process 0. All lines of all processes hold."""
    found = {}
    for name in NAMES:
        results = worker_pool.run(run_lesson, processes_of(name), name)
        assert [wrong for wrong, _ in results if wrong] == [], name
        found[name] = results[0][1]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_line_of_a_lesson_holds_and_its_page_shows_them(name: str, tables: dict[str, str]) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert tables[name] in page, f"put this into docs/from_scratch/{name}.md:\n{tables[name]}"


def test_a_lesson_starts_its_processes_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, LESSONS / "ring_all_reduce.py"], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert "bytes sent in reduce-scatter: (N - 1) / N" in done.stdout


@pytest.mark.parametrize("path", sorted(LESSONS.glob("*.py")), ids=lambda path: path.stem)
def test_a_file_is_short_and_of_plain_torch(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 150
    assert "lockstep" not in source


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_says_its_command_and_its_paper(name: str) -> None:
    source = (LESSONS / f"{name}.py").read_text(encoding="utf-8")
    assert f"python examples/from_scratch/{name}.py" in source
    assert re.search(r"^Papers?: ", ast.get_docstring(ast.parse(source)) or "", re.M)


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_page_is_that_of_the_lesson(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    source = (LESSONS / f"{name}.py").read_text(encoding="utf-8")
    # A page may also show what the lesson imports from another one.
    source += "".join(path.read_text(encoding="utf-8") for path in LESSONS.glob("*.py"))
    excerpts = re.findall(r"^<!-- lesson -->\n```python\n(.*?)^```$", page, re.M | re.S)
    assert excerpts
    # A method stands on the page without its indentation.
    assert [text for text in excerpts if text not in source and indent(text, "    ") not in source] == []
    assert f"python examples/from_scratch/{name}.py" in page
    assert re.search(rf"!\[[^\]]+\]\(\.\./images/from_scratch/{name}\.svg\)", page)
    assert (ROOT / "docs" / "images" / "from_scratch" / f"{name}.svg").is_file()


@pytest.mark.parametrize("wrong", [2.1, float("nan")])
def test_the_lessons_notice_a_wrong_number(wrong: float) -> None:
    same, right = lesson("world").same, torch.zeros(3)
    assert same("", [right], [right], within=0).holds
    assert not same("", [right, torch.tensor([1.0, wrong])], [right, torch.tensor([1.0, 2.0])]).holds
    with pytest.raises(RuntimeError):
        same("", [right], [torch.zeros(4)])


def test_the_lessons_notice_a_wrong_count() -> None:
    count = lesson("world").count
    assert count("", 1000, 4 * 3 / 4 * 1000 / 3).holds
    assert not count("", 1000, 1000.5).holds


def test_every_lesson_has_a_page_and_every_page_a_lesson() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} - {"index"} == set(NAMES)
