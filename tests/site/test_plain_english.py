"""Pages are easy to read: short sentences, no riddles, and who a page is for in its first lines."""

from __future__ import annotations

import re
import statistics

import pytest

from tests.site.pages import DOCS, ROOT
from tests.site.plain_english import RIDDLES, VAGUE, introduction, sentences, words

TEXTS = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
TEXTS["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
FOR_DEVELOPERS = ("architecture.md", "benchmarks.md")
MOST_WORDS = 38
MOST_ON_AVERAGE = 20


@pytest.mark.parametrize("name", TEXTS)
def test_sentences_are_short(name: str) -> None:
    factor = 1.5 if name in FOR_DEVELOPERS else 1
    found = sentences(TEXTS[name])
    assert [one for one in found if words(one) > factor * MOST_WORDS] == []
    assert statistics.mean(words(one) for one in found) <= factor * MOST_ON_AVERAGE


@pytest.mark.parametrize("name", TEXTS)
def test_no_page_has_riddles(name: str) -> None:
    text = " ".join(TEXTS[name].split())
    assert [phrase for phrase in RIDDLES if phrase in text] == []
    assert [word for word in VAGUE if re.search(rf"\b{word}\b", text, flags=re.IGNORECASE)] == []


@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"README.md"}))
def test_a_page_says_for_whom_it_is_and_what_they_will_have(name: str) -> None:
    first = introduction(TEXTS[name])
    assert re.search(r"\bfor (people|you)\b", first, flags=re.IGNORECASE), first
    assert re.search(r"\b[Yy]ou (will|keep)\b|runs on one device", first), first
