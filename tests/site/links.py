"""Links between pages, notebooks and other texts of the project: those that lead nowhere."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from tests.site.pages import DOCS, ROOT

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
HTML = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\"([^\"]+)\"")
CODE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2`*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"^(?:https?:|mailto:)")


def texts() -> dict[str, str]:
    """Path below the root -> Markdown, of all that has links; of a notebook the cells that are text."""
    paths = [
        *DOCS.rglob("*.md"),
        DOCS / "llms.txt",
        *ROOT.glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / "examples").rglob("*.ipynb"),
    ]
    return {path.relative_to(ROOT).as_posix(): text_of(path) for path in sorted(paths)}


@cache
def text_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def targets(text: str) -> list[str]:
    """What the text links to, code left out."""
    prose = CODE.sub(lambda found: "`x`" if found[0].startswith("`") and "\n" not in found[0] else "", text)
    return [*LINK.findall(prose), *REFERENCE.findall(prose), *HTML.findall(prose)]


def slug(heading: str) -> str:
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def anchors(text: str) -> set[str]:
    """The places of a page that a link can name: headings, names of the reference, anchors in HTML."""
    found: set[str] = set(re.findall(r"\b(?:id|name)=\"([^\"]+)\"", text))
    found |= set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    for heading in re.findall(r"^#+ +(.+?)(?: *\{[^}]*\})?$", CODE_BLOCK.sub("", text), re.MULTILINE):
        name, number = slug(heading), 0
        while (one := name if number == 0 else f"{name}_{number}") in found:
            number += 1
        found.add(one)
    return found


CODE_BLOCK = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2`*$", re.MULTILINE | re.DOTALL)


def dead(name: str, text: str) -> list[str]:
    """Links of a text, at ``name`` below the root, to files, folders and headings that are not there."""
    here, found = ROOT / name, []
    for target in targets(text):
        if ELSEWHERE.match(target):
            continue
        path, _, anchor = target.partition("#")
        page = (here.parent / path).resolve() if path else here
        if not page.exists() or not page.is_relative_to(ROOT.resolve()):
            found.append(f"{name}: {target}: no such file")
        elif anchor and page.suffix in (".md", ".ipynb"):
            there = text if page == here else text_of(page)
            if anchor not in anchors(there):
                found.append(f"{name}: {target}: no such heading")
    return found
