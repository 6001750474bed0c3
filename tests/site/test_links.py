"""No link leads nowhere: of pages, of texts beside the source, of notebooks. The check notices planted ones."""

from __future__ import annotations

import pytest

from tests.site.links import dead, texts

TEXTS = texts()


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_files_and_headings(name: str) -> None:
    assert dead(name, TEXTS[name]) == []


def test_all_kinds_of_texts_are_looked_at() -> None:
    assert {
        "README.md",
        "CHANGELOG.md",
        "examples/README.md",
        "docs/llms.txt",
        "docs/index.md",
        "examples/notebooks/quickstart.ipynb",
    } <= TEXTS.keys()


@pytest.mark.parametrize(
    "planted",
    [
        "[a page](zero_four.md)",
        "[a heading](zero.md#no-such-heading)",
        "[here](#no-such-heading)",
        "![a picture](images/no_such.svg)",
        '<img src="images/no_such.svg">',
        "[reference]: no_such.md",
        "[outside](../../../etc/passwd)",
        "[`code`](no_such.md) and [nested [brackets]](zero.md)",
    ],
)
def test_a_planted_dead_link_is_noticed(planted: str) -> None:
    assert len(dead("docs/index.md", f"# Title\n\n{planted}\n")) == 1


def test_links_in_code_and_good_ones_are_left_alone() -> None:
    good = "# A title, twice\n\n[x](zero.md) [y](#a-title-twice) <https://example.com> `[z](no.md)`\n"
    assert dead("docs/index.md", f"{good}\n```text\n[w](no.md)\n```\n") == []
