"""The pages of examples, recipes and notebooks: their code and what they print; and the gallery that leads to them."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path

from jinja2 import Template

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

SCRIPT = Template(
    """# {{ title }}

This page is for people who want to read, run or copy `{{ path }}`. You will find its code here
{%- if printed %}, and what it prints{% endif %}.

<!-- Written by python -m tests.site: do not edit. -->
{% if shows %}
{{ shows }}
{% endif %}
{%- if command %}
```console
{{ command }}
```
{% endif %}
{%- if real %}
For a real model: {{ real }}.
{% endif %}
{%- if picture %}
![{{ title }}]({{ picture }})
{% endif %}
{%- if printed %}
## What it prints

A short run:

```console
--8<-- "{{ printed }}"
```
{% endif %}
## Its code
{% if beside %}
It imports from {{ beside | join(", ") }} beside it.
{% endif %}
```python
--8<-- "{{ path }}"
```
"""
)
NOTEBOOK = Template(
    r"""{% for cell in cells %}
{%- if cell.cell_type == "markdown" -%}
{{ linked("".join(cell.source)) }}
{% else -%}
```py
{{ "".join(cell.source) }}
```
{% for output in cell.outputs %}
```text
{{ "\n".join("".join(output.text or output.data["text/plain"]).splitlines()) }}
```
{% endfor %}
{%- endif %}
{% endfor -%}
The file: `{{ path }}`.
"""
)
CARD = Template(
    """- **[{{ title }}]({{ place }})**
{% if picture %}
    ![{{ title }}]({{ picture }})
{% endif %}
    {{ shows }}
"""
)


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


def rows_of(readme: Path) -> list[tuple[Path, list[str]]]:
    """Each script of a README's tables, with the cells of its row."""
    found = []
    for line in readme.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ["):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            linked = LINK.search(cells[0])
            assert linked is not None
            found.append(((readme.parent / linked[2]).resolve(), [linked[1].strip("`"), *cells[1:]]))
    return found


RECIPES = dict(rows_of(EXAMPLES / "recipes/README.md"))
LISTED = dict(rows_of(EXAMPLES / "README.md")) | RECIPES


def script(path: Path) -> str:
    """The page of a script: what it shows, its command, a picture, what it prints, its code."""
    name, source = path.relative_to(EXAMPLES).as_posix(), path.read_text(encoding="utf-8")
    cells = dict(zip(("title", "shows", "command", "real"), LISTED.get(path, [name, ""]), strict=False))
    cells |= {"shows": shown(path, page_of(path)), "command": cells.get("command", "").strip("`")}
    modules = dict.fromkeys(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    beside = [f"[`{one}.py`]({one}.md)" for one in modules if path.with_name(f"{one}.py") in PAGES]
    picture = name in PICTURES and os.path.relpath(DOCS / PICTURES[name], page_of(path).parent)
    printed = file_of(name).is_file() and file_of(name).relative_to(ROOT).as_posix()
    return f"{SCRIPT.render(path=f'examples/{name}', beside=beside, picture=picture, printed=printed, **cells)}\n"


def shown(path: Path, page: Path) -> str:
    """What an example shows, as a sentence of a page."""
    text = LISTED.get(path, ["", ""])[1]
    here = EXAMPLES / "recipes" if path in RECIPES else EXAMPLES
    return relinked(f"{text[0].upper()}{text[1:]}.", here, page) if text else ""


def notebook(path: Path) -> str:
    """The page of a notebook: its cells, and what each printed."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    linked = partial(relinked, here=path.parent, page=page_of(path))
    return f"{NOTEBOOK.render(cells=cells, linked=linked, path=path.relative_to(ROOT).as_posix())}\n"


def card(path: Path) -> str:
    """An entry of the gallery."""
    place, picture = os.path.relpath(page_of(path), DOCS), PICTURES.get(path.relative_to(EXAMPLES).as_posix())
    text = shown(path, DOCS / "recipes.md")
    return f"{CARD.render(title=RECIPES[path][0], place=place, picture=picture, shows=text)}\n"


def gallery() -> str:
    """docs/recipes.md with a card for each recipe, and tables of the other examples."""
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    text = with_block(text, "recipes", "\n".join(map(card, RECIPES)))
    others = [path for path in LISTED if path not in RECIPES and "from_scratch" not in path.parts]
    pages = {path: os.path.relpath(PAGES.get(path, DOCS / "how-to/rlhf.md"), DOCS) for path in others}
    rows = [
        [f"[`{LISTED[path][0]}`]({page})", shown(path, DOCS / "recipes.md")] for path, page in pages.items()
    ]
    return with_block(text, "examples", table(["example", "what it shows"], rows))


def navigation() -> str:
    """The lines of mkdocs.yml: recipes by their titles, then the other files by their paths."""
    titles = {path: path.relative_to(EXAMPLES).as_posix() for path in SOURCES}
    titles = {path: cells[0] for path, cells in RECIPES.items()} | {
        path: LISTED.get(path, [name])[0] for path, name in titles.items() if path not in RECIPES
    }
    places = {path: page_of(path).relative_to(DOCS).as_posix() for path in titles}
    return "".join(f'          - "{title}": {places[path]}\n' for path, title in titles.items())


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
