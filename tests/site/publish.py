"""Builds the site: ``python -m tests.site.publish`` into ``site/``; with a folder, as one version beside others.

Zensical builds the pages. This adds edit links to the repository that the clone comes from, each page's Markdown beside
it (``llms.txt`` links to that), and the files by which a page's version selector finds the other versions.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import lockstep
from tests.site.pages import DOCS, ROOT

ADDRESSES = runpy.run_path(str(ROOT / "setup.py"), run_name="addresses")
INCLUDED = re.compile(r'^--8<-- "(.+)"\n', re.MULTILINE)
REDIRECT = '<!doctype html><title>Lockstep</title><meta http-equiv="refresh" content="0; url={version}/">\n'


def edit_links(remote: str) -> dict[str, str]:
    """The variables of ``mkdocs.yml`` that give each page its edit link."""
    address = ADDRESSES["web_address"](remote)
    return {"DOCS_REPOSITORY": address, "DOCS_EDIT_URI": "edit/main/docs"} if address else {}


def add_markdown(docs: Path, site: Path) -> None:
    """Puts each page's Markdown where ``llms.txt`` names it."""
    for page in docs.rglob("*.md"):
        target = site / page.relative_to(docs)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = page.read_text(encoding="utf-8")
        target.write_text(
            INCLUDED.sub(lambda found: (ROOT / found[1]).read_text(encoding="utf-8"), text), "utf-8"
        )


def add_version(site: Path, public: Path, version: str) -> None:
    """Copies a built site to ``public/<version>``, lists it in ``versions.json``, and lets ``/`` lead to the newest."""
    shutil.rmtree(public / version, ignore_errors=True)
    shutil.copytree(site, public / version)
    there = sorted((path.name for path in public.iterdir() if path.is_dir()), key=_as_numbers, reverse=True)
    listed = [
        {"version": one, "title": one, "aliases": ["latest"] if one == there[0] else []} for one in there
    ]
    (public / "versions.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    (public / "index.html").write_text(REDIRECT.format(version=there[0]), encoding="utf-8")
    text = (public / there[0] / "llms.txt").read_text(encoding="utf-8")
    (public / "llms.txt").write_text(re.sub(r"\]\((?!https?:)", f"]({there[0]}/", text), encoding="utf-8")


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def main(public: Path | None) -> None:
    remote = ADDRESSES["origin"]()
    variables = {"DOCS_VERSIONS": "mike" if public else "none", **edit_links(remote)}
    build = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    subprocess.run(build, cwd=ROOT, env={**variables, **os.environ}, check=True)
    add_markdown(DOCS, ROOT / "site")
    if public:
        add_version(ROOT / "site", public, lockstep.__version__)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
