"""One name of the distribution: pyproject, the constant, messages, documents and the command agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import lockstep
from lockstep.distribution import DISTRIBUTION
from lockstep.errors import MissingExtraError
from tests.command import LOCKSTEP

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = ("src", "docs", "tests", "examples", "benchmarks", ".ci", ".github")
TEXTS = (".py", ".pyi", ".md", ".toml", ".yml", ".yaml", ".json", ".txt", ".sh", "")
TAKEN = "lockstep" + "-train"  # by another project on PyPI
EXTRA = re.compile(r"['\"]([\w.-]+)\[([a-z][a-z,]*)\]")  # as in: pip install 'name[extra]'


def texts() -> dict[str, str]:
    """Every text of the tree that people or pip read."""
    paths = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    for folder in FOLDERS:
        paths += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8", errors="ignore")
        for path in paths
        if path.suffix in TEXTS and ".egg-info" not in str(path)
    }


def test_pyproject_has_the_name_and_the_version_that_the_code_has() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["version"] == lockstep.__version__
    # Scripts written for Accelerate register their save hooks from its version 0.16 on.
    assert Version(lockstep.__version__) >= Version("0.16")


def test_the_extras_that_name_the_distribution_name_this_one() -> None:
    named = [
        Requirement(text)
        for texts in PROJECT["optional-dependencies"].values()
        for text in texts
        if "lockstep" in text
    ]
    assert named
    assert {requirement.name for requirement in named} == {DISTRIBUTION}
    assert set().union(*(requirement.extras for requirement in named)) <= set(
        PROJECT["optional-dependencies"]
    )


def test_no_text_names_the_distribution_of_somebody_else() -> None:
    found = [name for name, text in texts().items() if TAKEN in text or TAKEN.replace("-", "_") in text]
    assert found == []


def test_every_line_that_installs_an_extra_names_the_distribution_and_an_extra_that_there_is() -> None:
    found = [
        (name, match[1], extra)
        for name, text in texts().items()
        if name.endswith(".md") or name.startswith("tests/cluster/")
        for line in re.findall(r"pip install[^`\n]*", text)
        for match in EXTRA.finditer(line)
        for extra in match[2].split(",")
    ]
    assert {name for name, _, _ in found} >= {"README.md", "docs/getting-started.md"}
    # Of the folder of the source: the distribution itself is not on PyPI.
    wrong = [item for item in found if item[1] != "." or item[2] not in PROJECT["optional-dependencies"]]
    assert wrong == []


def test_a_missing_extra_is_installed_by_a_line_that_works() -> None:
    text = str(MissingExtraError("a feature", "a_package", "ray"))
    # The distribution is not on PyPI, but the package is.
    assert "pip install a_package " in text and "pip install '.[ray]'" in text and DISTRIBUTION not in text


def test_the_extras_that_messages_name_exist() -> None:
    from lockstep.observe.trackers import TRACKERS

    named = re.findall(r'MissingExtraError\([^)]*"(\w+)"\)', "".join(texts().values()))
    assert {"ray", "examples"} <= {*named} <= {*PROJECT["optional-dependencies"]}
    assert {entry.extra for entry in TRACKERS.values() if entry.package} <= {
        *PROJECT["optional-dependencies"]
    }


def test_only_the_constant_spells_the_name_in_the_code() -> None:
    spelt = [name for name, text in texts().items() if name.startswith("src/") and DISTRIBUTION in text]
    assert spelt == ["src/lockstep/distribution.py"]


def test_nothing_asks_for_the_metadata_of_the_distribution() -> None:
    """An editable installation made under another name must go on working."""
    code = (
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        "def version(name):\n"
        "    if 'lockstep' in name: raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.version = version\n"
        "from lockstep.checkpoint.format import versions\n"
        "from lockstep.launch import gather_inventory\n"
        "print(versions()['lockstep'], gather_inventory(with_torch=False))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"'{DISTRIBUTION}': '{lockstep.__version__}'" in done.stdout
    assert done.stdout.startswith(lockstep.__version__)


def test_the_command_shows_the_version() -> None:
    done = subprocess.run([*LOCKSTEP, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"lockstep, version {PROJECT['version']}"


def metadata(root: Path) -> list[str]:
    """The lines that setuptools writes about the distribution whose source is in ``root``."""
    program = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')"
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True)
    (folder,) = root.glob("*.dist-info")
    return (folder / "METADATA").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("remote", ["https://example.org/owner/name.git", None])
def test_the_addresses_are_those_of_the_repository_that_is_built(tmp_path: Path, remote: str | None) -> None:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src" / "lockstep").mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    if remote:
        subprocess.run(["git", "remote", "add", "origin", remote], cwd=tmp_path, check=True)
    addresses = [line for line in metadata(tmp_path) if line.startswith("Project-URL: ")]
    assert ("Project-URL: Source, https://example.org/owner/name" in addresses) == bool(remote)
    assert len(addresses) == (5 if remote else 0)
    # a source distribution has no remote, and keeps what it was made with
    shutil.rmtree(tmp_path / ".git")
    (made,) = tmp_path.glob("*.dist-info")
    shutil.move(made / "METADATA", tmp_path / "PKG-INFO")
    shutil.rmtree(made)
    assert [line for line in metadata(tmp_path) if line.startswith("Project-URL: ")] == addresses
