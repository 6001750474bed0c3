"""What is watched while libraries are imported ahead of time."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

import lockstep
from lockstep.launch.spare import (
    EnvironmentReads,
    Finder,
    Libraries,
    Unfit,
    libraries_only,
    run_imports,
    shadowed,
    watched_reads,
)
from tests.refusals import expect_refusal


def test_every_way_to_read_a_variable_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONE", "TWO", "THREE", "FOUR"):
        monkeypatch.setenv(name, "1")
    reads, kind = EnvironmentReads(), type(os.environ)
    with watched_reads(reads):
        assert os.environ["ONE"] == os.environ.get("TWO") == os.getenv("THREE") == "1"
        assert "FOUR" in os.environ and os.environ.get("MISSING") is None
        os.environ["WRITTEN"] = "1"
    del os.environ["WRITTEN"]
    assert reads.names == {"ONE", "TWO", "THREE", "FOUR", "MISSING"}
    assert type(os.environ) is kind
    with watched_reads(reads):
        assert os.environ.copy() == dict(os.environ)
    assert set(os.environ) <= reads.names


def test_a_library_that_looks_for_its_own_variables_reads_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_ASCII", "1")
    tqdm = types.ModuleType("tqdm.utils")
    source = "import os\nfound = {k: v for k, v in os.environ.items() if k.startswith('TQDM_')}"
    reads = EnvironmentReads()
    with watched_reads(reads):
        exec(source, tqdm.__dict__)
    assert reads.names == {"TQDM_ASCII"}
    assert tqdm.found == {"TQDM_ASCII": "1"}


@pytest.mark.parametrize(
    ("changed", "matter"),
    [("READ", True), ("RANK", False), ("OMP_NUM_THREADS", True), ("TORCH_LOGS", True), ("TORCHELASTIC_RUN_ID", False)],
)  # fmt: skip
def test_a_variable_matters_if_it_was_read_or_is_one_of_compiled_libraries(
    changed: str, matter: bool
) -> None:
    reads = EnvironmentReads()
    reads.names.add("READ")
    assert reads.matter([changed]) == [changed] * matter


def test_files_of_python_and_of_installed_packages_are_libraries(tmp_path: Path) -> None:
    libraries = Libraries()
    for module in (os, pytest, lockstep):
        assert module.__file__ is not None
        assert libraries.has_file(module.__file__)
    assert not libraries.has_file(str(tmp_path / "mine.py"))
    assert not libraries.has_file(__file__)
    assert libraries.has_package("os") and libraries.has_package("sys") and libraries.has_package("wave")
    assert not libraries.has_package("no_such_module_anywhere")


def test_a_module_beside_the_script_hides_one_that_was_imported(tmp_path: Path) -> None:
    for name in ("one.py", "two.txt", "three"):
        (tmp_path / name).touch()
    (tmp_path / "four").mkdir()
    (tmp_path / "five").mkdir()
    (tmp_path / "five" / "__init__.py").touch()
    assert sorted(shadowed(str(tmp_path), ["one", "two", "three", "four", "five"])) == ["five", "one"]
    assert shadowed(str(tmp_path / "missing"), ["one"]) == []


@pytest.mark.parametrize("changes", ["nothing", "sys.path", "the working directory"])
def test_imports_that_change_what_the_script_would_see_are_refused(
    changes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))

    def enter() -> None:
        with libraries_only(str(tmp_path / "script")):
            assert sys.path[0] == str(tmp_path / "script")
            if changes == "sys.path":
                sys.path.append("/more")
            elif changes == "the working directory":
                os.chdir("/")

    if changes == "nothing":
        enter()
        assert sys.path == before
    else:
        with pytest.raises(Unfit, match=changes):
            enter()
    assert not any(isinstance(finder, Finder) for finder in sys.meta_path)


def test_an_import_that_fails_is_named() -> None:
    expect_refusal(Unfit, "from os import nothing", run_imports, ["import os", "from os import nothing"])
