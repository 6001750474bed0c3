"""The pages of examples, recipes and notebooks: their code and what they print; and the gallery that leads to them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from tests.examples.printed import file_of
from tests.site.pages import DOCS, ROOT, table, with_block

EXAMPLES = ROOT / "examples"
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
NAME = re.compile(r"(?<!\[)`(examples/[\w/]+\.(?:py|ipynb))`")
PICTURES = {
    "recipes/lora.py": "images/from_scratch/zero3.svg",
    "recipes/contrastive.py": "images/from_scratch/ring_all_reduce.svg",
    "recipes/gan.py": "images/accumulation.svg",
    "recipes/long_context.py": "images/context-parallel.svg",
    "recipes/mixture_of_experts.py": "images/expert-parallel.svg",
    "recipes/slow_links.py": "images/asynchronous.svg",
    "recipes/larger_than_memory.py": "images/streaming.svg",
    "recipes/ema.py": "images/sharding.svg",
    "gpt/train.py": "images/report.png",
}
"""Scripts -> the picture of what they are about."""

HEAD = """# {title}

This page is for people who want to read, run or copy `examples/{path}`. You will find its code here{printed}.

<!-- Written by python -m tests.site: do not edit. -->
"""


def page_of(path: Path) -> Path:
    """Where the page of an example stands."""
    return DOCS / path.relative_to(ROOT).with_suffix(".md")


SOURCES = sorted([*EXAMPLES.rglob("*.py"), *EXAMPLES.rglob("*.ipynb")])
PAGES = {path: page_of(path) for path in SOURCES}


def relinked(text: str, here: Path, page: Path) -> str:
    """Markdown of a file of the folder ``here`` as a page has it: links lead to pages, or are left out."""

    def link(found: re.Match[str]) -> str:
        target = (here / found[2]).resolve()
        target = PAGES.get(target, target)
        if not target.is_relative_to(DOCS):
            return found[1]
        return f"[{found[1]}]({os.path.relpath(target, page.parent)}{found[3] or ''})"

    return LINK.sub(link, text)


def rows(readme: Path) -> list[tuple[Path, list[str]]]:
    """Each script of a README's tables, with the cells of its row."""
    found = []
    for line in readme.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ["):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            linked = LINK.search(cells[0])
            assert linked is not None
            found.append(((readme.parent / linked[2]).resolve(), [linked[1].strip("`"), *cells[1:]]))
    return found


RECIPES = dict(rows(EXAMPLES / "recipes/README.md"))
LISTED = dict(rows(EXAMPLES / "README.md")) | RECIPES


def script(path: Path) -> str:
    """The page of a script: what it shows, its command, what it prints, a picture, its code."""
    name = path.relative_to(EXAMPLES).as_posix()
    title, shows, *rest = LISTED.get(path, [name, ""])
    page, printed = page_of(path), file_of(name)
    is_printed = printed.is_file()
    parts = [HEAD.format(title=title, path=name, printed=", and what it prints" if is_printed else "")]
    if shows:
        parts.append(f"{relinked(_sentence(shows), EXAMPLES, page)}\n")
    parts += [f"```console\n{command.strip('`')}\n```\n" for command in rest[:1]]
    if rest[1:]:
        parts.append(f"For a real model: {rest[1]}.\n")
    if name in PICTURES:
        parts.append(f"![{title}]({os.path.relpath(DOCS / PICTURES[name], page.parent)})\n")
    if is_printed:
        parts.append(f"## What it prints\n\nA short run:\n\n{included('console', printed)}")
    beside = re.findall(r"^(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    others = [
        f"[`{one}.py`]({one}.md)" for one in dict.fromkeys(beside) if (path.parent / f"{one}.py").is_file()
    ]
    parts.append("## Its code\n")
    if others:
        parts.append(f"It imports from {', '.join(others)} beside it.\n")
    return "\n".join([*parts, included("python", path)])


def included(language: str, path: Path) -> str:
    """A block with the text of a file, which the build of the site reads."""
    return f'```{language}\n--8<-- "{path.relative_to(ROOT).as_posix()}"\n```\n'


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def notebook(path: Path) -> str:
    """The page of a notebook: its cells, and what each printed."""
    page, parts = page_of(path), []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(f"{relinked(text, path.parent, page)}\n")
        else:
            parts += [
                f"```python\n{text}\n```\n",
                *(f"```text\n{out}\n```\n" for out in map(_text, cell["outputs"])),
            ]
    parts.append(f"The file: `{path.relative_to(ROOT).as_posix()}`.\n")
    return "\n".join(parts)


def _text(output: dict[str, Any]) -> str:
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return "".join(text).rstrip()


def card(path: Path) -> str:
    """An entry of the gallery."""
    name = path.relative_to(EXAMPLES).as_posix()
    title, shows = LISTED[path][:2]
    place = os.path.relpath(page_of(path), DOCS)
    shown = relinked(_sentence(shows), EXAMPLES, DOCS / "recipes.md")
    picture = f"    ![{title}]({PICTURES[name]})\n\n" if name in PICTURES else ""
    return f"- **[{title}]({place})**\n\n{picture}    {shown}\n"


def gallery() -> str:
    """docs/recipes.md with a card for each recipe, and tables of the other examples."""
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    text = with_block(text, "recipes", "\n".join(map(card, RECIPES)))
    others = [path for path in LISTED if path not in RECIPES and "from_scratch" not in path.parts]
    linked = [[_place(path), relinked(LISTED[path][1], EXAMPLES, DOCS / "recipes.md")] for path in others]
    return with_block(text, "examples", table(["example", "what it shows"], linked))


def _place(path: Path) -> str:
    """A link to a script, or to the page of a folder of them."""
    page = PAGES.get(path, DOCS / "how-to/rlhf.md")
    return f"[`{LISTED[path][0]}`]({os.path.relpath(page, DOCS)})"


def navigation() -> str:
    """The lines of mkdocs.yml: recipes by their titles, then the other files by their paths."""
    lines = []
    for path in [*RECIPES, *(path for path in SOURCES if path not in RECIPES)]:
        title = LISTED.get(path, [path.relative_to(EXAMPLES).as_posix()])[0]
        lines.append(f'          - "{title}": {page_of(path).relative_to(DOCS).as_posix()}\n')
    return "".join(lines)


def pages() -> dict[str, str]:
    """Path below the root -> text."""
    texts = {page: (script if path.suffix == ".py" else notebook)(path) for path, page in PAGES.items()}
    return {page.relative_to(ROOT).as_posix(): text for page, text in texts.items()} | {
        "docs/recipes.md": gallery()
    }


def unlinked(page: Path) -> list[str]:
    """Names of examples in the running text of a page that lead nowhere."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [name for name in NAME.findall(text) if page_of(ROOT / name) != page]
