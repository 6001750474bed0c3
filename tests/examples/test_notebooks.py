"""The notebooks run from their first cell to their last, and are committed with the outputs that they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks import FOLDER, PATHS, VARIES, code_cells, executed, paths_of_a_machine, read, text_of
from tests.site.plain_english import introduction

NAMES = [path.stem for path in PATHS]


@pytest.fixture(scope="module", params=PATHS, ids=NAMES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A notebook as it is committed, and as it is after a run."""
    return read(request.param), executed(request.param, tmp_path_factory.mktemp("notebook"))


def test_a_notebook_runs_and_prints_what_it_is_committed_with(both: tuple[Any, Any]) -> None:
    committed, ran = both
    for there, now in zip(code_cells(committed), code_cells(ran), strict=True):
        if VARIES in there.metadata.get("tags", []):
            assert bool(text_of(there)) == bool(text_of(now)), there.source
        else:
            assert text_of(now) == text_of(there), f"run python -m tests.notebooks after:\n{there.source}"


def test_a_report_names_what_was_planted(both: tuple[Any, Any]) -> None:
    committed, ran = ("".join(map(text_of, code_cells(notebook))) for notebook in both)
    if "What it did" in committed:
        assert "step 40 was skipped" in ran
        assert "1 spike of loss or gradient norm; 1 batch skipped." in ran
        assert "The others wait for rank 1" in committed  # how slow it is depends on what else runs


def test_the_three_are_there() -> None:
    assert NAMES == ["quickstart", "reading_a_report", "zero_by_hand"]


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_committed_notebook_has_the_outputs_of_one_run_and_nothing_of_the_machine(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(text_of(cell) for cell in cells)
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert paths_of_a_machine(path.read_text(encoding="utf-8")) == []
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert path.stat().st_size < 40_000


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_notebook_says_for_whom_it_is_and_a_page_leads_to_it(path: Path) -> None:
    first = " ".join(introduction(read(path).cells[0].source))
    assert "is for people who" in first.replace("whose", "who") and "you will have" in first
    pages = (FOLDER.parents[1] / "docs").rglob("*.md")
    assert any(f"examples/notebooks/{path.name}" in page.read_text(encoding="utf-8") for page in pages)
    assert f"notebooks/{path.name}" in (FOLDER.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/home/someone/runs/report.html", 1),
        ("saved to '/tmp/x'", 1),
        ("run/report.html and ../../docs/zero.md", 0),
        ("https://example.com/tmp/x", 0),
    ],
)
def test_a_path_of_a_machine_is_noticed(text: str, found: int) -> None:
    assert len(paths_of_a_machine(text)) == found
