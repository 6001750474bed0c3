"""Pages are easy to read: short sentences, no riddles, and who a page is for in its first lines."""

from __future__ import annotations

import re
import statistics

import pytest

from tests.site.pages import DOCS, ROOT
from tests.site.plain_english import VAGUE, defined, introduction, riddles, sentences, words

TEXTS = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
TEXTS["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    name for name in TEXTS if name not in ("README.md", "changelog.md") and not name.startswith("zh/")
)
"""Those in English; test_translations.py compares the others with them."""
GLOSSARY = TEXTS["concepts/glossary.md"]
MOST_WORDS = 35
MOST_ON_AVERAGE = 16
FOR_WHOM = re.compile(
    r"(This (page|tutorial|notebook) is|These pages are|^)\s*for (people|you)\b", re.IGNORECASE
)
WITH_WHAT = re.compile(r"^(In \d+ minutes you|At the end you|You) (will|keep)\b")
NOT_GUIDES = {"architecture.md", "concepts/glossary.md", "comparison.md"}
LABELS = {"healthy_run.md", "release-checklist.md"}
"""Pages whose italics quote what a screen shows."""


@pytest.mark.parametrize("name", TEXTS)
def test_sentences_are_short(name: str) -> None:
    found = sentences(TEXTS[name])
    assert [one for one in found if words(one) > MOST_WORDS] == []
    assert statistics.mean(words(one) for one in found) <= MOST_ON_AVERAGE


@pytest.mark.parametrize("name", TEXTS)
def test_no_page_has_riddles(name: str) -> None:
    text = " ".join(TEXTS[name].split())
    assert riddles(TEXTS[name]) == []
    assert [word for word in VAGUE if re.search(rf"\b{word}\b", text, flags=re.IGNORECASE)] == []


@pytest.mark.parametrize("name", TEXTS)
def test_percent_stands_behind_its_number_and_heads_of_tables_name_the_library(name: str) -> None:
    assert re.findall(r"\d %(?![\w(%])", TEXTS[name]) == []
    assert re.findall(r"^\|.*\| (?:here|there) \|.*\n\|[ -]", TEXTS[name], flags=re.MULTILINE) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_in_two_sentences_for_whom_it_is_and_what_they_will_have(name: str) -> None:
    first, second = introduction(TEXTS[name])[:2]
    assert FOR_WHOM.search(first), first
    assert WITH_WHAT.search(second), second


@pytest.mark.parametrize("name", PAGES)
def test_the_glossary_has_each_term_that_a_page_explains(name: str) -> None:
    terms = (
        set() if name in LABELS or name.startswith(("from_scratch/", "examples/")) else defined(TEXTS[name])
    )
    assert {term for term in terms if f"**{term.removesuffix('s')}" not in GLOSSARY} == set()


def test_the_glossary_is_in_order() -> None:
    terms = [line.split("**")[1].lower().replace("`", "") for line in GLOSSARY.splitlines() if "| **" in line]
    assert terms == sorted(terms)
    assert len(terms) > 80


def test_most_pages_link_their_first_term_to_the_glossary() -> None:
    guides = [name for name in PAGES if not name.startswith(("from_scratch/", "reference/", "examples/"))]
    without = [name for name in guides if "glossary.md" not in TEXTS[name]]
    field = re.compile(r"\b(ranks?|collectives?|all-reduce|micro-batch(es)?|shards|sharded)\b")
    assert [name for name in without if len(field.findall(TEXTS[name])) > 8 and name not in NOT_GUIDES] == []
