"""What is added to the built pages: edit links, Markdown for llms.txt, versions beside each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.site import publish
from tests.site.pages import DOCS


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/owner/name.git", "https://github.com/owner/name"),
        ("https://user@gitlab.com/group/sub/name", "https://gitlab.com/group/sub/name"),
        ("git@github.com:owner/name.git", "https://github.com/owner/name"),
        ("ssh://git@git.example.org:2222/owner/name.git", "https://git.example.org/owner/name"),
        ("/srv/name", None),
        ("../name", None),
        ("", None),
    ],
)
def test_edit_links_lead_to_the_origin_of_the_clone(remote: str, address: str | None) -> None:
    assert publish.edit_links(remote).get("DOCS_REPOSITORY") == address


def test_each_link_of_llms_txt_is_a_file_of_the_site(tmp_path: Path) -> None:
    publish.add_markdown(DOCS, tmp_path)
    links = re.findall(r"\]\(([^)#]+)", (DOCS / "llms.txt").read_text(encoding="utf-8"))
    assert len(links) > 15
    assert [link for link in links if not (tmp_path / link).exists() and not (DOCS / link).exists()] == []
    assert "\nimport torch\n" in (tmp_path / "examples/recipes/gan.md").read_text()


def test_versions_stand_beside_each_other_and_the_newest_comes_first(tmp_path: Path) -> None:
    site, public = tmp_path / "site", tmp_path / "public"
    site.mkdir()
    for version in ("1.9.0", "1.10.0", "1.2.0"):
        (site / "llms.txt").write_text(f"[{version}](start.md) [torch](https://pytorch.org)")
        publish.add_version(site, public, version)
    listed = json.loads((public / "versions.json").read_text())
    assert [one["version"] for one in listed] == ["1.10.0", "1.9.0", "1.2.0"]
    assert [one["aliases"] for one in listed] == [["latest"], [], []]
    assert "url=1.10.0/" in (public / "index.html").read_text()
    assert (public / "llms.txt").read_text() == "[1.10.0](1.10.0/start.md) [torch](https://pytorch.org)"
