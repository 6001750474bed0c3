"""Which size is tried next: doubling, then bisection, among the divisors of a rank's rows of a step. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def divisors(rows: int) -> list[int]:
    """Sizes of micro-batches that make up ``rows`` without a rest, ascending."""
    small = [size for size in range(1, int(rows**0.5) + 1) if rows % size == 0]
    return sorted({*small, *(rows // size for size in small)})


def next_size(sizes: Sequence[int], start: int, fits: Mapping[int, bool]) -> int | None:
    """Return the size to try next; None: the largest that fits is known.

    From ``start`` on sizes are doubled while they fit, or halved until one does; then the gap is bisected. If none
    fits beside the first one, a smaller one is tried too, so that there is something to compare its speed with.

    Args:
        sizes: Ascending.
        fits: What is known of those that were tried.
    """
    if start not in fits:
        return start
    good = [size for size in sizes if fits.get(size)]
    bad = [size for size in sizes if fits.get(size) is False]
    if not good:
        below = [size for size in sizes if size < bad[0]]
        return next((size for size in reversed(below) if 2 * size <= bad[0]), None) if below else None
    low = good[-1]
    high = min((size for size in bad if size > low), default=None)
    between = [size for size in sizes if size > low and (high is None or size < high)]
    if between and high is None:
        return next((size for size in between if size >= 2 * low), between[-1])
    if between:
        # Half of the divisors that are left, not half of the rows.
        return between[len(between) // 2]
    if len(good) == 1:
        half = next((size for size in reversed(sizes) if 2 * size <= low), None)
        return None if half is None or half in fits else half
    return None
