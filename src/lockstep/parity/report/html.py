"""A verdict as one HTML file: the answer, a picture of modules and steps, the table. It loads nothing."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping

from lockstep.parity.judge.verdict import ParityVerdict, Ratio
from lockstep.parity.report.text import RIGHT, TITLES, remarks, rows, sentence
from lockstep.parity.trace.items import ItemKind, TraceItem
from lockstep.words import count, escape, two_digits

MOST_MODULES = 300
"""Rows of the picture; deeper modules are put together until there are no more."""
MOST_STEPS = 12
MOST_LISTED = 200
COLUMNS = {"data": "d", "forward": "f", "backward": "b", "clipping": "c", "optimizer": "o"}
"""Phase -> its letter above a column."""
SHADES = (
    (0.0, "exact"),
    (0.1, "near"),
    (1.0, "agrees"),
    (10.0, "beyond"),
    (100.0, "far"),
    (math.inf, "lost"),
)
"""Up to which multiple of what is allowed a cell has which class."""
LEGEND = {
    "exact": "equal",
    "near": "up to a tenth of what is allowed",
    "agrees": "up to what is allowed",
    "beyond": "up to 10 times that",
    "far": "up to 100 times",
    "lost": "more",
}
_KINDS = {"tensor": "name", "found": "words", "looks like": "words"}
"""Column -> class of its cells."""
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d5dae0; --quiet: #5b6470;
  --exact: #e3f1e6; --near: #c4e4cb; --agrees: #8fcb9c; --beyond: #ffc285; --far: #f4804f; --lost: #c8322f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #15181c; --line: #343a42; --quiet: #9aa4b0;
  --exact: #1d2d22; --near: #23492d; --agrees: #2f7040; --beyond: #8a5a1d; --far: #b4491f; --lost: #e5484d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.answer { font-size: 1.1rem; border-left: 4px solid var(--agrees); padding: .3rem 1rem; overflow-wrap: anywhere; }
.answer.differs { border-color: var(--lost); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; } td, th { padding: .25rem .6rem; text-align: left; vertical-align: top; }
.list td, .list th { border-bottom: 1px solid var(--line); } .list th { white-space: nowrap; }
.list .name { min-width: 11rem; max-width: 26rem; overflow-wrap: anywhere; } .list .words { min-width: 9rem; }
code { font: .92em ui-monospace, monospace; }
.right { text-align: right !important; white-space: nowrap; }
.strip { border-collapse: separate; border-spacing: 1px; font-size: 12px; }
.strip td, .strip th { padding: 0 .25rem; min-width: 1rem; height: 1rem; font-weight: normal; }
.strip th.step { text-align: center; border-bottom: 1px solid var(--line); } .strip td.first { border-left: 4px solid
  var(--paper); }
.exact { background: var(--exact); } .near { background: var(--near); } .agrees { background: var(--agrees); }
.beyond { background: var(--beyond); } .far { background: var(--far); } .lost { background: var(--lost); }
.legend span { display: inline-block; margin-right: 1rem; color: var(--quiet); font-size: 13px; }
.legend i { display: inline-block; width: .9rem; height: .9rem; margin-right: .3rem; vertical-align: -2px; }
p.remark { color: var(--quiet); margin: .3rem 0; }
"""


def to_html(verdict: ParityVerdict) -> str:
    """A complete document."""
    differs = "" if verdict.agrees else " differs"
    facts = verdict.facts
    title = (
        f"lockstep check: {count(facts.nproc, 'rank')}{f' with {facts.candidate}' if facts.candidate else ''}"
    )
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1>{_escaped(title)}</h1><p class="answer{differs}">{_prose(sentence(verdict))}</p>',
    ]
    if verdict.findings:
        parts.append(f"<h2>What differs</h2>{_table(verdict)}")
    if verdict.ratios:
        parts.append(f"<h2>Distance by what is allowed</h2>{_strip(verdict)}{_legend()}")
    parts += [f'<p class="remark">{_escaped(remark)}</p>' for remark in remarks(verdict)]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def heat(ratios: Iterable[Ratio], depth: int) -> dict[str, dict[tuple[int, str], float]]:
    """By module, in the order of the run, and by step and phase, the largest distance by what is allowed.

    ``depth``: how many parts of a module's name are kept.
    """
    cells: dict[str, dict[tuple[int, str], float]] = {}
    for one in ratios:
        if one.item.kind is ItemKind.WEIGHT:
            continue
        of_module = cells.setdefault(_module(one.item, depth), {})
        place = (one.item.step, one.item.kind.phase)
        of_module[place] = max(of_module.get(place, 0.0), one.ratio)
    return cells


def _module(item: TraceItem, depth: int) -> str:
    if item.kind in (ItemKind.BATCH, ItemKind.LOSS, ItemKind.NORM, ItemKind.RATE):
        return item.kind.value
    is_of_module = item.kind in (ItemKind.OUTPUT, ItemKind.OUTPUT_GRADIENT)
    name = item.name if is_of_module else item.name.rpartition(".")[0]
    return ".".join(name.split(".")[:depth]) or "(model)"


def _strip(verdict: ParityVerdict) -> str:
    depth = max((one.item.name.count(".") + 1 for one in verdict.ratios), default=1)
    while len(cells := heat(verdict.ratios, depth)) > MOST_MODULES and depth > 1:
        depth -= 1
    steps = sorted({step for of_module in cells.values() for step, _ in of_module})[:MOST_STEPS]
    phases = {place for of_module in cells.values() for place in of_module}
    columns = [(step, phase) for step in steps for phase in COLUMNS if (step, phase) in phases]
    heads = "".join(
        f'<th class="step" colspan="{sum(of == step for of, _ in columns)}">step {step}</th>'
        for step in steps
    )
    letters = "".join(f'<th title="{phase}">{COLUMNS[phase]}</th>' for _, phase in columns)
    lines = [f"<tr><th></th>{heads}</tr><tr><th></th>{letters}</tr>"]
    for name, of_module in list(cells.items())[:MOST_MODULES]:
        lines.append(f"<tr><th>{_escaped(name)}</th>{_cells(name, of_module, columns)}</tr>")
    return f'<div class="scroll"><table class="strip">{"".join(lines)}</table></div>'


def _cells(name: str, of_module: Mapping[tuple[int, str], float], columns: list[tuple[int, str]]) -> str:
    cells = []
    for index, (step, phase) in enumerate(columns):
        first = " first" if index and columns[index - 1][0] != step else ""
        if (step, phase) not in of_module:
            cells.append(f'<td class="{first.strip()}"></td>')
            continue
        ratio = of_module[step, phase]
        label = _escaped(f"step {step}, {phase}, {name}: {two_digits(ratio)} of what is allowed")
        cells.append(f'<td class="{shade(ratio)}{first}" title="{label}"></td>')
    return "".join(cells)


def shade(ratio: float) -> str:
    """The class of a cell."""
    return next(name for limit, name in SHADES if ratio <= limit)


def _legend() -> str:
    phases = ", ".join(f"{letter}: {phase}" for phase, letter in COLUMNS.items())
    shades = "".join(f'<span><i class="{name}"></i>{text}</span>' for name, text in LEGEND.items())
    return f'<p class="legend">{shades}<span>{phases}</span></p>'


def _table(verdict: ParityVerdict) -> str:
    kinds = ["right" if title in RIGHT else _KINDS.get(title, "") for title in TITLES]
    head = "".join(f'<th class="{kind}">{title}</th>' for title, kind in zip(TITLES, kinds, strict=True))
    lines = [f"<tr>{head}</tr>"]
    for row in rows(verdict, MOST_LISTED):
        cells = [f'<td class="{kind}">{_prose(cell)}</td>' for cell, kind in zip(row, kinds, strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table class="list">{"".join(lines)}</table></div>'


def _prose(text: str) -> str:
    """Names between backquotes as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", _escaped(text))


def _escaped(text: str) -> str:
    return html.escape(escape(text))
