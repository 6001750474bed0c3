"""The table of recipes, as its page has it."""

from __future__ import annotations

import re

from tests.site.pages import DOCS, ROOT, table, with_block

README = ROOT / "examples" / "recipes" / "README.md"


def page() -> str:
    """docs/recipes.md, with the table of examples/recipes/README.md and each file's path in place of a link."""
    lines = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    text = table(head, ([re.sub(r"\[(.+)\]\((.+)\)", _with_path, row[0]), *row[1:]] for row in rows))
    return with_block((DOCS / "recipes.md").read_text(encoding="utf-8"), "recipes", text)


def _with_path(link: re.Match[str]) -> str:
    path = (README.parent / link[2]).resolve().relative_to(ROOT)
    return f"{link[1]}: `{path.as_posix()}`"
