"""The documentation says what the source does: its code runs, its commands parse, its tables are complete.

A Python block after the comment ``<!-- runs -->`` is executed together with those before it on the page, one
after ``<!-- sketch -->`` or without a comment is only compiled. One after ``<!-- runs with LIBRARY -->`` is a script by
itself, which prints the same on one process and on two. It is skipped if that library is not installed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import tomllib
import yaml

from lockstep.cli import cli
from lockstep.compat.accelerate import ONLY_IN_ACCELERATE, OTHER_KEYS, SECTIONS, Ignored, from_yaml
from lockstep.config import parse_yaml
from lockstep.observe.trackers import TRACKERS
from lockstep.utils import LoggerType
from tests.command import LOCKSTEP
from tests.compat.processes import ALONE
from tests.warm_interpreter import WarmInterpreter

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
BLOCK = re.compile(
    r"^(?:<!-- (runs|sketch|runs with \w+) -->\n)?```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL
)


def blocks(name: str, language: str) -> list[tuple[bool, str]]:
    """Blocks of one page: whether it runs, and its text."""
    return [(mark == "runs", text) for mark, kind, text in BLOCK.findall(TEXTS[name]) if kind == language]


def code(name: str) -> str:
    return "\n".join(text for runs, text in blocks(name, "python") if runs)


@pytest.mark.parametrize("name", TEXTS)
def test_every_python_block_compiles(name: str) -> None:
    for _, text in blocks(name, "python"):
        compile(text, name, "exec")


@pytest.mark.parametrize("name", [name for name in TEXTS if code(name)])
def test_the_code_of_a_page_runs(warm_interpreter: WarmInterpreter, name: str, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(code(name), encoding="utf-8")
    exit_code, output = warm_interpreter.run(tmp_path / "page.py")
    assert exit_code == 0, f"{name}\n{output}"


WITH_OTHERS = [
    (name, mark.removeprefix("runs with "), text)
    for name, page in TEXTS.items()
    for mark, _, text in BLOCK.findall(page)
    if mark.startswith("runs with ")
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "library", "text"), WITH_OTHERS, ids=[row[1] for row in WITH_OTHERS])
def test_code_with_another_library_prints_the_same_on_two_processes(
    warm_interpreter: WarmInterpreter, name: str, library: str, text: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script = tmp_path / "page.py"
    script.write_text(text, encoding="utf-8")
    exit_code, output = warm_interpreter.run(script)
    assert exit_code == 0, f"{name}\n{output}"
    command = [*LOCKSTEP, "launch", "--nproc", "2", "--run-dir", "no", str(script)]
    done = subprocess.run(command, env=ALONE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}"
    printed = done.stdout.splitlines()
    assert printed
    assert [line for line in printed if line not in output.splitlines()] == [], output


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every ``lockstep`` command in a block, and of those with options and a script in the text."""
    found = []
    for name, text in TEXTS.items():
        lines = "".join(body for _, body in blocks(name, "bash")).replace("\\\n", " ").splitlines()
        inline = re.findall(r"`(lockstep \w+ --[^`]+)`", BLOCK.sub("", text))
        found += [(name, shlex.split(line, comments=True)) for line in [*lines, *inline]]
    return [(name, words) for name, words in found if words and words[0] == "lockstep"]


@pytest.mark.parametrize(
    ("name", "words"), commands(), ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_a_lockstep_command_parses(name: str, words: list[str]) -> None:
    subcommand = cli.get_command(click.Context(cli), words[1])
    assert subcommand is not None, f"{name}: {words}"
    context = subcommand.make_context(words[1], words[2:])
    if words[1] == "launch":
        script = context.params["script"]
        is_on_page = f"<!-- file: {script} -->" in TEXTS[name]
        assert script == "train.py" or is_on_page or (ROOT / script).is_file()


def test_every_option_of_launch_is_documented() -> None:
    command = cli.get_command(click.Context(cli), "launch")
    assert command is not None
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    real = {word for option in options for word in option.opts}
    table = section("reference/configuration.md", "Options")
    assert set(re.findall(r"`(--?[a-z][a-z0-9-]*)`", "".join(first_cells(table)))) == real


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r": ([\w/.-]+\.md)$", text, flags=re.MULTILINE)) == set(TEXTS)


def section(name: str, heading: str) -> str:
    return re.split(r"^## ", TEXTS[name].split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    """The first cells of the table rows in a text, without the head."""
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return [cell for cell in rows[1:] if set(cell) != {"-"}]


def test_the_table_of_other_yaml_keys_is_that_of_the_source() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+)",
        section("reference/configuration.md", "Configuration file"),
        flags=re.MULTILINE,
    )
    expected = dict.fromkeys(SECTIONS, "used")
    expected |= dict.fromkeys(ONLY_IN_ACCELERATE, "checked")
    expected |= {key: "No" if isinstance(rule, Ignored) else "refused" for key, rule in OTHER_KEYS.items()}
    assert {key: word.replace("no", "No") if word == "no" else word for key, word in rows} == expected


def test_yaml_examples_are_accepted() -> None:
    examples = [text for name in TEXTS for _, text in blocks(name, "yaml")]
    assert examples
    for text in examples:
        assert from_yaml(parse_yaml(text, "docs")).config.given()


def test_documented_environment_variables_are_read() -> None:
    table = section("reference/environment.md", "Other variables")
    documented = set(re.findall(r"`([A-Z]\w+)`", "".join(first_cells(table))))
    readers = ("config/sources.py", "config/place.py", "utils/environment.py")
    source = "".join((ROOT / "src/lockstep" / name).read_text(encoding="utf-8") for name in readers)
    assert [variable for variable in documented if variable not in source] == []


def test_every_tracker_is_documented_with_its_extra() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (?:`(\w+)`|none) \|$", TEXTS["tracking.md"], flags=re.MULTILINE)
    assert dict(rows) == {entry.name: entry.extra for entry in TRACKERS.values()}
    assert {name for name, _ in rows} == set(LoggerType.list()) - {"all"}


def test_every_dependency_has_its_line() -> None:
    project = re.findall(
        r'^(?:  |\w+ = \[)?"?([\w-]+)(?:\[\w+\])?[><=]=', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    names = {name for name in project if name.lower() not in ("requires", "setuptools")}
    text = TEXTS["dependencies.md"]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_quoted_messages_are_those_of_the_source() -> None:
    templates = [
        text for path in (ROOT / "src").rglob("*.py") for text in strings(ast.parse(path.read_text()))
    ]
    quoted = re.findall(
        r"^\| `(.+?)` \|", section("troubleshooting.md", "What common messages mean"), flags=re.MULTILINE
    )
    assert len(quoted) > 10
    for message in quoted:
        parts = message.split("…")
        assert any(in_order(parts, template) for template in templates), message


def strings(tree: ast.AST) -> list[str]:
    """Every string of a module; the values of an f-string are left out."""
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    found = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        for node in joined
    ]
    return found + [
        n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]


def in_order(parts: list[str], text: str) -> bool:
    position = 0
    for part in parts:
        position = text.find(part.strip(), position)
        if position < 0:
            return False
    return True


def test_the_tree_in_the_architecture_page_names_every_folder() -> None:
    (tree,) = [text for _, text in blocks("architecture.md", "text") if text.startswith("src/lockstep/")]
    source = ROOT / "src/lockstep"
    named: list[str] = []
    folders: list[str] = []  # those that the line stands in
    for line in tree.splitlines()[1:]:
        indent, text = line.split("── ", 1)
        entry = re.split(r"  +", text.strip())[0]
        folders = folders[: len(indent) // 4]
        if entry.endswith("/"):
            folders.append(entry.strip("/"))
            named.append("/".join(folders))
    packages = [path.parent.relative_to(source).as_posix() for path in source.glob("*/**/__init__.py")]
    assert sorted(named) == sorted(packages)
    assert len(TEXTS["architecture.md"].splitlines()) <= 300


def test_the_layers_in_the_architecture_page_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(
        contract["layers"] for contract in contracts if "lockstep.accelerator" in contract.get("layers", ())
    )
    checked = [[name.strip().removeprefix("lockstep.") for name in layer.split("|")] for layer in layers]
    page = TEXTS["architecture.md"].split("\n## Layers\n")[1]
    (line,) = [part for part in page.split("\n\n") if part.startswith("`testing` → ")]
    shown = [re.findall(r"\w+", layer) for layer in line.split("→")]
    # The page shortens the layer of names that Accelerate has.
    assert [
        [name for name in layer if name in shown_layer]
        for layer, shown_layer in zip(checked, shown, strict=True)
    ] == shown
    packages = {path.parent.name for path in (ROOT / "src/lockstep").glob("*/__init__.py")}
    assert packages <= {name for layer in shown for name in layer}


def test_the_walks_in_the_architecture_page_lead_through_files_that_exist() -> None:
    source = ROOT / "src/lockstep"
    (walks,) = re.findall(r"^## Walks\n(.*?)^## ", TEXTS["architecture.md"], flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^### (.+)$", walks, flags=re.MULTILINE)
    assert len(titles) == 7
    last = source / "accelerator.py"
    for name in re.findall(r"`(?!tests/)([\w/]+\.py)`", walks):
        # A name without a folder is of the file before it, or stands above that.
        found = [folder / name for folder in last.parents if (folder / name).is_file()]
        assert found, f"{name}, after {last}"
        last = found[0]


def test_paths_in_the_text_of_the_architecture_page_exist() -> None:
    text = re.sub(r"^```.*?^```$", "", TEXTS["architecture.md"], flags=re.MULTILINE | re.DOTALL)
    below = [ROOT, *(ROOT / "src/lockstep" / folder for folder in (".", "checkpoint", "parallel", "verify"))]
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text))
    assert len(named) > 60
    assert [name for name in named if not any((folder / name).exists() for folder in below)] == []


def test_the_site_configuration_loads_nothing_from_the_network() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)
    assert site["theme"]["font"] == "false"
    assert "analytics" not in site.get("extra", {})
