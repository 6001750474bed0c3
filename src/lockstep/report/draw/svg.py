"""Lines and areas as paths of an SVG that is stretched to the width of the page.

The coordinates are whole numbers on a grid of ``WIDTH`` x ``HEIGHT``; lines keep their width (non-scaling-stroke), and
what is written stands beside the SVG, in HTML, so that it keeps its size.
"""

from __future__ import annotations

import numpy as np

from lockstep.history.columns import FloatArray

WIDTH, HEIGHT = 2000, 1000


def line(x: FloatArray, y: FloatArray) -> str:
    """A path through the points, of places between 0 and 1; where ``y`` is no number, it is interrupted."""
    whole_x = np.rint(x * WIDTH).astype(int)
    known = np.isfinite(y)
    whole_y = np.rint((1 - np.where(known, y, 0.0)) * HEIGHT).astype(int)
    # Where known turns, in pairs: begin and end of each run of numbers.
    edges = np.flatnonzero(np.diff(np.concatenate(([False], known, [False])).astype(int)))
    parts = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        parts.append(_piece(whole_x[start:end], whole_y[start:end]))
    return "".join(parts)


def area(x: FloatArray, y: FloatArray) -> str:
    """The same with all that is below it."""
    whole_x = np.rint(x * WIDTH).astype(int)
    whole_y = np.rint((1 - np.nan_to_num(y)) * HEIGHT).astype(int)
    return f"{_piece(whole_x, whole_y)}V{HEIGHT}H{whole_x[0]}Z" if len(x) else ""


def _piece(x: FloatArray, y: FloatArray) -> str:
    """One run of points: the first as it is, each other by how far it is from the one before."""
    moved = np.stack((np.diff(x), np.diff(y)), axis=1).tolist()
    # A point alone is a line of no length, which round ends make a dot.
    steps = " ".join(f"{across} {down}" for across, down in moved) or "0 0"
    # A minus parts two numbers by itself.
    return f"M{x[0]} {y[0]}l{steps}".replace(" -", "-")


def drawing(paths: str, label: str) -> str:
    """The SVG itself. ``label``: what it shows, already escaped."""
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none"'
    return f'<svg {box} role="img" aria-label="{label}">{paths}</svg>'


def path(shape: str, style: str, name: str = "") -> str:
    """``style``: its classes. ``name``, already escaped: what its values are called when they are pointed at; nothing:
    they are not shown."""
    attribute = f' data-n="{name}"' if name else ""
    return f'<path class="{style}"{attribute} d="{shape}"/>' if shape else ""


def grid(across: list[float], down: list[float]) -> str:
    """Thin lines at these places."""
    lines = [f"M{round(place * WIDTH)} 0V{HEIGHT}" for place in across]
    lines += [f"M0 {round((1 - place) * HEIGHT)}H{WIDTH}" for place in down]
    return path("".join(lines), "grid")


def upright(places: list[float], style: str) -> str:
    """Lines from top to bottom at these places."""
    return path("".join(f"M{round(place * WIDTH)} 0V{HEIGHT}" for place in places), style)
