"""A page in another language has the code, the structure and the links of the English one, which the tests run."""

from __future__ import annotations

import re

import pytest

from tests.site.links import targets
from tests.site.pages import DOCS, ROOT

TRANSLATED = {"zh/index.md": "index.md", "zh/first-run.md": "tutorials/first-run.md"}
BLOCK = re.compile(r"^(?:<!-- [^\n]* -->\n)?```\w+\n.*?^```$", re.MULTILINE | re.DOTALL)


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def linked(name: str) -> set[str]:
    """The pages and pictures that a page links to, but for translations, and for what a translation adds."""
    here = (DOCS / name).parent
    paths = {
        (here / link).resolve().relative_to(DOCS.resolve()).as_posix() for link in targets(text_of(name))
    }
    return {TRANSLATED.get(path, path) for path in paths} - set(TRANSLATED.values())


def outline(name: str) -> list[str]:
    """The level of each heading, with its number if it has one."""
    return re.findall(r"^(#+ (?:\d+\.)?)", BLOCK.sub("", text_of(name)), re.MULTILINE)


def test_every_page_in_chinese_is_the_translation_of_one() -> None:
    assert {f"zh/{path.name}" for path in (DOCS / "zh").glob("*")} == set(TRANSLATED)


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_translation_has_the_blocks_of_the_page(name: str) -> None:
    assert BLOCK.findall(text_of(name)) == BLOCK.findall(text_of(TRANSLATED[name]))


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_translation_has_the_headings_and_links_of_the_page(name: str) -> None:
    assert outline(name) == outline(TRANSLATED[name])
    assert linked(TRANSLATED[name]) == linked(name)


@pytest.mark.parametrize("name", TRANSLATED)
def test_the_languages_link_to_each_other(name: str) -> None:
    english = TRANSLATED[name]
    assert (DOCS / name).resolve() in {
        ((DOCS / english).parent / link).resolve() for link in targets(text_of(english))
    }
    assert (DOCS / english).resolve() in {
        ((DOCS / name).parent / link).resolve() for link in targets(text_of(name))
    }


@pytest.mark.parametrize("name", TRANSLATED)
def test_code_in_a_translation_stands_between_spaces_or_punctuation(name: str) -> None:
    """Chinese next to a letter or to code has a space, and no line ends within a sentence, which would add one."""
    text = BLOCK.sub("", text_of(name))
    assert re.findall(r"[\u4e00-\u9fff][A-Za-z`]|[A-Za-z][\u4e00-\u9fff]", text) == []
    assert re.findall(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]\n[\u4e00-\u9fff]", text) == []


def test_the_pages_are_in_the_navigation_under_the_name_of_the_language() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f": {name}\n" in text.split("- 中文:\n")[1] for name in TRANSLATED)
