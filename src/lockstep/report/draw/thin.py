"""Fewer points of a curve that is to look the same: every spike stays."""

from __future__ import annotations

import itertools

import numpy as np

from lockstep.history.columns import FloatArray, IndexArray


def buckets(x: FloatArray, count: int) -> IndexArray:
    """The first index of each of at most ``count`` parts of equal length on the axis, and the number of points.

    ``x`` ascends. Parts without a point are left out.
    """
    if not len(x):
        return np.zeros(1, dtype=np.int64)
    edges = np.linspace(x[0], x[-1], count + 1)[:-1]
    starts = np.unique(np.searchsorted(x, edges, side="left"))
    return np.append(starts[starts < len(x)], len(x))


def thinned(x: FloatArray, y: FloatArray, count: int) -> tuple[FloatArray, FloatArray]:
    """At most 2 * ``count`` of the points: the least and the greatest ``y`` of each part of the axis, and the ends.

    ``x`` ascends; points without a number must have been dropped.
    """
    if len(x) <= 2 * count:
        return x, y
    bounds = buckets(x, count)
    keep = [0, len(x) - 1]
    for start, end in itertools.pairwise(bounds):
        part = y[start:end]
        keep += [start + int(part.argmin()), start + int(part.argmax())]
    chosen = np.unique(np.array(keep))
    return x[chosen], y[chosen]


def means(x: FloatArray, y: FloatArray, count: int) -> tuple[FloatArray, FloatArray]:
    """One point for each part of the axis: the mean of its points that are numbers."""
    bounds = buckets(x, count)[:-1]
    known = np.isfinite(y)
    counts = np.add.reduceat(known.astype(float), bounds) if len(x) else np.zeros(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        centres = np.add.reduceat(np.where(known, x, 0.0), bounds) / counts if len(x) else counts
        values = np.add.reduceat(np.where(known, y, 0.0), bounds) / counts if len(x) else counts
    there = counts > 0
    return centres[there], values[there]
