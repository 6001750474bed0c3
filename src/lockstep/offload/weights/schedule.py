"""Which unit to load next, and which to let go for it. Nothing here has effects.

The order of use is learnt; what is let go is what will be used last (L. A. Belady, A study of replacement
algorithms for a virtual-storage computer, 1966), and a load begins as early as it does no harm (P. Cao,
E. Felten, A. Karlin, K. Li, A study of integrated prefetching and caching strategies, 1995).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

UnitT = TypeVar("UnitT")

_NEVER = 1 << 30


class Successors(Generic[UnitT]):
    """Which unit follows which pair of units that were used one after the other, as was seen last."""

    def __init__(self, units: Sequence[UnitT]) -> None:
        self._order = list(units)
        self._position = {unit: index for index, unit in enumerate(units)}
        self._after_pair: dict[tuple[UnitT | None, UnitT], UnitT] = {}
        self._after_one: dict[UnitT, UnitT] = {}
        self._previous: UnitT | None = None
        self._current: UnitT | None = None
        self._in_backward = False

    def learn(self, unit: UnitT, in_backward: bool = False) -> None:
        """``unit`` is used now."""
        self._in_backward = in_backward
        if unit == self._current:
            return
        if self._current is not None:
            self._after_pair[self._previous, self._current] = unit
            if not in_backward:
                self._after_one[self._current] = unit
        self._previous, self._current = self._current, unit

    def coming(self, n: int) -> Iterator[UnitT]:
        """The ``n`` units that will probably be used next, one after the other.

        What was never seen follows the order of registration: around in forward, back in backward.
        """
        previous, current, in_backward = self._previous, self._current, self._in_backward
        if current is None:
            yield from self._order[:n]
            return
        for _ in range(n):
            following = self._after_pair.get((previous, current))
            if following is None and not in_backward:
                following = self._after_one.get(current)
            if following is None:
                position = self._position[current]
                in_backward = in_backward and position > 0  # after the first unit's comes the next forward
                following = self._order[(position + (-1 if in_backward else 1)) % len(self._order)]
            yield following
            previous, current = current, following


@dataclass(frozen=True)
class Choice(Generic[UnitT]):
    """What to load, and what to let go before."""

    load: UnitT
    evict: tuple[UnitT, ...]


def choose_urgent(
    unit: UnitT,
    sizes: Mapping[UnitT, int],
    budget: int,
    loaded: Collection[UnitT],
    held: Collection[UnitT],
    coming: Iterable[UnitT],
) -> Choice[UnitT] | None:
    """How to load ``unit``, which is needed now. None: what is ``held`` leaves no room for it."""
    missing = sizes[unit] + sum(sizes[one] for one in loaded) - budget
    if missing <= 0:
        return Choice(unit, ())
    evictable = set(loaded).difference(held)
    return _evicting(unit, missing, sizes, _next_uses(evictable, coming))


def choose_ahead(
    sizes: Mapping[UnitT, int],
    budget: int,
    loaded: Collection[UnitT],
    unused: Collection[UnitT],
    held: Collection[UnitT],
    coming: Iterable[UnitT],
    ahead: int,
) -> Choice[UnitT] | None:
    """What to load before it is needed: the first of ``coming`` that isn't ``loaded``. None: nothing now.

    Not while ``ahead`` units that come before it are loaded and ``unused``; and nothing that is used sooner is let go
    for it, nor what is ``held``.
    """
    if not ahead or len(loaded) == len(sizes):
        return None
    # Along the chain of coming uses up to the first unit that is missing.
    waiting: set[UnitT] = set()
    seen: dict[UnitT, int] = {}
    chain = enumerate(coming)
    for position, unit in chain:
        if unit not in loaded:
            break
        seen.setdefault(unit, position)
        if unit in unused:
            waiting.add(unit)
            if len(waiting) >= ahead:
                return None
    else:
        return None
    missing = sizes[unit] + sum(sizes[one] for one in loaded) - budget
    if missing <= 0:
        return Choice(unit, ())
    later = set(loaded).difference(held, seen)  # what is used before the unit stays
    # The rest of the chain: only uses behind that of the unit count.
    return _evicting(unit, missing, sizes, _next_uses(later, (one for _, one in chain)))


def _next_uses(units: set[UnitT], coming: Iterable[UnitT]) -> dict[UnitT, int]:
    """How far each of ``units`` is from its next use, as far as can be seen."""
    found: dict[UnitT, int] = {}
    for position, unit in enumerate(coming):
        if len(found) == len(units):
            break
        if unit in units:
            found.setdefault(unit, position)
    return {unit: found.get(unit, _NEVER) for unit in units}


def _evicting(
    unit: UnitT, missing: int, sizes: Mapping[UnitT, int], next_uses: Mapping[UnitT, int]
) -> Choice[UnitT] | None:
    evicted = []
    for candidate in sorted(next_uses, key=next_uses.__getitem__, reverse=True):
        if sizes[candidate]:
            evicted.append(candidate)
            missing -= sizes[candidate]
            if missing <= 0:
                return Choice(unit, tuple(evicted))
    return None
