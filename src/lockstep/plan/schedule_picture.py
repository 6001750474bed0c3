"""A pipeline's timeline in letters, and as an SVG: ranks are rows, time goes to the right.

In letters ``F3--`` is forward of micro-batch 3, with dashes while it lasts. The SVG has its own light background, so
that it reads the same on light and dark pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from xml.sax.saxutils import escape

from lockstep.plan.schedule import KINDS, Action, Span, Timeline

MOST_COLUMNS = 2000


def local_stages(timeline: Timeline) -> dict[int, int]:
    """Each stage's place among the stages of its rank, from 0."""
    places: dict[int, int] = {}
    for spans in timeline.ranks:
        own = sorted({span.action.stage for span in spans})
        places |= {stage: place for place, stage in enumerate(own)}
    return places


def text_rows(timeline: Timeline) -> list[list[tuple[str, str]]]:
    """For each rank (text, kind) pieces of one length in all; the kind of a pause is "".

    Rounding is of the ends, so that what happens at one time stands in one column. Nothing, if a line would be longer
    than ``MOST_COLUMNS``.
    """
    spans = [span for rank in timeline.ranks for span in rank]
    if not spans:
        return []
    places = local_stages(timeline)
    several = max(places.values()) > 0
    width = 1 + max(len(_label(span.action, places, several)) for span in spans)
    # The shortest action has room for the longest label.
    scale = width / min(span.end - span.start for span in spans)
    if timeline.makespan * scale > MOST_COLUMNS:
        return []
    return [_row(rank, scale, timeline.makespan, places, several) for rank in timeline.ranks]


def _row(
    spans: Sequence[Span], scale: float, makespan: float, places: dict[int, int], several: bool
) -> list[tuple[str, str]]:
    pieces: list[tuple[str, str]] = []
    column = 0
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        if start > column:
            pieces.append((" " * (start - column), ""))
        label = _label(span.action, places, several)
        pieces.append((f"{label.ljust(end - start - 1, '-')} ", span.action.kind))
        column = end
    pieces.append((" " * (round(makespan * scale) - column), ""))
    return pieces


def _label(action: Action, places: dict[int, int], several: bool) -> str:
    """``F3``; with several stages on a rank ``F3a``, ``F3b``, ..."""
    place = chr(ord("a") + min(places[action.stage], 25)) if several else ""
    return f"{action.kind}{action.micro_batch}{place}"


COLOURS = {"F": (86, 160, 211), "B": (255, 183, 3), "I": (244, 140, 92), "W": (118, 190, 130)}
INK, PAPER, IDLE, LINE = "#1b1f24", "#ffffff", "#e6e9ed", "#5b6470"
LEFT, TOP, ROW, GAP = 64, 64, 26, 6
UNIT, MOST_WIDTH, LEAST_WIDTH = 24.0, 1400.0, 560.0
DIGIT = 7.0
TRANSFER = "an outline holds two actions whose results are sent together"


def svg(timeline: Timeline, title: str) -> str:
    """A complete SVG document: ``title`` above, a box for each action, a legend below.

    The boxes have the class ``action``. Stages of a rank are told apart by shade, from light to dark.
    """
    makespan = timeline.makespan or 1
    unit = min(UNIT, MOST_WIDTH / makespan)
    places = local_stages(timeline)
    legend = _legend(timeline, places)
    width = max(LEAST_WIDTH, LEFT + makespan * unit + 20)
    below = TOP + len(timeline.ranks) * (ROW + GAP) + 18
    height = below + 26 * len(legend) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
        f'height="{_n(height)}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_n(width)}" height="{_n(height)}" rx="6" fill="{PAPER}"/>',
        f'<text x="16" y="28" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT}" y="{TOP - 10}" fill="{LINE}">time 0</text>',
        f'<text x="{_n(LEFT + makespan * unit)}" y="{TOP - 10}" fill="{LINE}" text-anchor="end">'
        f"{timeline.makespan:g}</text>",
    ]
    for rank, spans in enumerate(timeline.ranks):
        top = TOP + rank * (ROW + GAP)
        parts.append(f'<text x="16" y="{top + 18}">rank {rank}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{_n(makespan * unit)}" height="{ROW}" fill="{IDLE}"/>'
        )
        parts += [_box(span, top, unit, places) for span in spans]
        parts += _pairs(spans, top, unit)
    for line, entries in enumerate(legend):
        parts += _legend_line(entries, below + 26 * line)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(span: Span, top: float, unit: float, places: dict[int, int]) -> str:
    action, width = span.action, (span.end - span.start) * unit
    x = LEFT + span.start * unit
    colour = shade(action.kind, places[action.stage], max(places.values()))
    title = (
        f"rank {action.rank}, stage {action.stage}: {KINDS[action.kind]} of micro-batch {action.micro_batch}, "
        f"{span.start:g} to {span.end:g}"
    )
    box = (
        f'<rect class="action" x="{_n(x)}" y="{top}" width="{_n(width)}" height="{ROW}" fill="{_hex(colour)}" '
        f'stroke="{PAPER}" stroke-width="0.8"><title>{title}</title></rect>'
    )
    if len(str(action.micro_batch)) * DIGIT + 2 > width:
        return box
    return (
        f'{box}<text x="{_n(x + width / 2)}" y="{top + 17}" text-anchor="middle" fill="{_ink(colour)}" '
        f'pointer-events="none">{action.micro_batch}</text>'
    )


def _pairs(spans: Sequence[Span], top: float, unit: float) -> list[str]:
    return [
        f'<rect class="pair" x="{_n(LEFT + first.start * unit + 0.8)}" y="{top + 0.8}" '
        f'width="{_n((second.end - first.start) * unit - 1.6)}" height="{ROW - 1.6}" fill="none" stroke="{INK}" '
        'stroke-width="1.6"/>'
        for first, second in itertools.pairwise(spans)
        if first.action.paired
    ]


def shade(kind: str, place: int, last: int) -> tuple[int, int, int]:
    """The colour of a kind, darker for later stages of a rank, of which ``last`` is the darkest."""
    red, green, blue = COLOURS[kind]
    keep = 1 - 0.5 * place / max(last, 1)
    return (round(red * keep), round(green * keep), round(blue * keep))


def _ink(colour: tuple[int, int, int]) -> str:
    red, green, blue = colour
    # Luma (Rec. 601), 0 to 255: numbers on dark boxes are light.
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else PAPER


def _hex(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _legend(timeline: Timeline, places: dict[int, int]) -> list[list[tuple[str, str]]]:
    """Lines of (colour, text)."""
    used = {span.action.kind for spans in timeline.ranks for span in spans}
    last = max(places.values(), default=0)
    kinds = [(_hex(shade(kind, 0, last)), f"{name} ({kind})") for kind, name in KINDS.items() if kind in used]
    lines = [[*kinds, (IDLE, "idle")]]
    if last:
        shades = [
            (_hex(shade("F", place, last)), f"stage {place + 1} of a rank") for place in range(last + 1)
        ]
        lines += [shades[start : start + 6] for start in range(0, len(shades), 6)]
    if any(span.action.paired for spans in timeline.ranks for span in spans):
        lines.append([(PAPER, TRANSFER)])
    return lines


def _legend_line(entries: Sequence[tuple[str, str]], y: float) -> list[str]:
    parts, x = [], 16.0
    for colour, text in entries:
        edge = INK if colour == PAPER else LINE
        parts.append(
            f'<rect x="{_n(x)}" y="{y}" width="14" height="14" fill="{colour}" stroke="{edge}" stroke-width="0.8"/>'
            f'<text x="{_n(x + 20)}" y="{y + 12}">{escape(text)}</text>'
        )
        x += 38 + DIGIT * len(text)
    return parts


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
