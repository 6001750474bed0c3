"""A pipeline's timeline in letters: ranks are rows, time goes to the right.

``F3--`` is forward of micro-batch 3, with dashes while it lasts.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.plan.schedule import Action, Span, Timeline

MOST_COLUMNS = 2000


def local_stages(timeline: Timeline) -> dict[int, int]:
    """Return each stage's place among the stages of its rank, from 0."""
    places: dict[int, int] = {}
    for spans in timeline.ranks:
        own = sorted({span.action.stage for span in spans})
        places |= {stage: place for place, stage in enumerate(own)}
    return places


def text_rows(timeline: Timeline) -> list[list[tuple[str, str]]]:
    """Return for each rank (text, kind) pieces of one length in all; the kind of a pause is "".

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
    """Return a label such as ``F3``; with several stages on a rank ``F3a``, ``F3b``, ..."""
    place = chr(ord("a") + min(places[action.stage], 25)) if several else ""
    return f"{action.kind}{action.micro_batch}{place}"
