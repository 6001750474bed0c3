"""Generated pages are those of the source and the data, and say everything that there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import lockstep
from lockstep.config import IN_FILES
from tests.examples import printed
from tests.site import examples, features, names, schema
from tests.site.pages import DOCS, ROOT
from tests.site.written import pages

PAGES = pages()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_that_of_the_source(path: str) -> None:
    found = (ROOT / path).read_text(encoding="utf-8")
    assert found == PAGES[path], "run python -m tests.site, which writes it anew"


def test_no_name_is_without_a_sentence() -> None:
    page = PAGES["docs/reference/names.md"]
    assert re.findall(r"^\| \S+ \| *\|$", page, flags=re.MULTILINE) == []


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.stem)
def test_an_example_that_a_page_names_is_a_link(path: Path) -> None:
    assert examples.unlinked(path) == []


def test_every_example_has_a_page_and_what_is_recorded_is_of_an_example() -> None:
    assert {path.suffix for path in examples.SOURCES} == {".py", ".ipynb"}
    assert {path.relative_to(DOCS / "examples") for path in (DOCS / "examples").rglob("*.md")} == {
        path.relative_to(examples.EXAMPLES).with_suffix(".md") for path in examples.SOURCES
    }
    recorded = {path.relative_to(printed.FOLDER).with_suffix(".py") for path in printed.FOLDER.rglob("*.txt")}
    assert recorded <= {path.relative_to(examples.EXAMPLES) for path in examples.SOURCES}
    assert {path.relative_to(examples.EXAMPLES) for path in examples.RECIPES} <= recorded


def test_every_key_of_a_file_has_a_schema() -> None:
    assert set(schema.schema()["properties"]) == set(IN_FILES)


@pytest.mark.parametrize("name", ["configuration.md"])
def test_files_of_the_reference_fit_the_schema(name: str) -> None:
    properties = json.loads(schema.text())["properties"]
    text = (DOCS / "reference" / name).read_text(encoding="utf-8")
    for example in re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        for key, value in yaml.load(example, yaml.BaseLoader).items():
            rule = properties.get(key, {})
            assert value in rule.get("enum", [value])
            if rule.get("type") == "integer":
                assert rule["minimum"] <= int(value) <= rule["maximum"]


def test_every_row_of_the_feature_table_is_complete_and_leads_to_a_page() -> None:
    data = features.load()
    rows = [row for group in data["groups"] for row in group["rows"]]
    assert len(rows) > 20
    for row in rows:
        assert set(row) - {"readme", "words"} == {"feature", "page", "state", *data["peers"]}
        assert all(type(row[key]) is str for key in row if key not in ("readme", "words")), row
        assert (DOCS / row["page"]).is_file(), row


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


def test_type_checkers_know_every_public_name() -> None:
    stub = (ROOT / "src/lockstep/__init__.pyi").read_text(encoding="utf-8")
    assert set(re.findall(r" as (\w+)$", stub, flags=re.MULTILINE)) == set(names.public(lockstep))
