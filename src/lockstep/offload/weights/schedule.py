"""Which group to load next, and which to let go for it. Nothing here has effects.

The order of use is learnt; what is let go is what will be used last (L. A. Belady, A study of replacement
algorithms for a virtual-storage computer, 1966), and a load begins as early as it does no harm (P. Cao,
E. Felten, A. Karlin, K. Li, A study of integrated prefetching and caching strategies, 1995).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

GroupT = TypeVar("GroupT")

_NEVER = 1 << 30


class Successors(Generic[GroupT]):
    """Which group follows which pair of groups that were used one after the other, as was seen last."""

    def __init__(self, groups: Sequence[GroupT]) -> None:
        self._order = list(groups)
        self._position = {group: index for index, group in enumerate(groups)}
        self._after_pair: dict[tuple[GroupT | None, GroupT], GroupT] = {}
        self._after_one: dict[GroupT, GroupT] = {}
        self._previous: GroupT | None = None
        self._current: GroupT | None = None
        self._in_backward = False

    def learn(self, group: GroupT, in_backward: bool = False) -> None:
        """Note that ``group`` is used now."""
        self._in_backward = in_backward
        if group == self._current:
            return
        if self._current is not None:
            self._after_pair[self._previous, self._current] = group
            if not in_backward:
                self._after_one[self._current] = group
        self._previous, self._current = self._current, group

    def coming(self, n: int) -> Iterator[GroupT]:
        """Yield the ``n`` groups that will probably be used next, one after the other.

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
                # After the first group's comes the next forward.
                in_backward = in_backward and position > 0
                following = self._order[(position + (-1 if in_backward else 1)) % len(self._order)]
            yield following
            previous, current = current, following


@dataclass(frozen=True)
class Choice(Generic[GroupT]):
    """What to load, and what to let go before."""

    load: GroupT
    evict: tuple[GroupT, ...]


def choose_urgent(
    group: GroupT,
    sizes: Mapping[GroupT, int],
    budget: int,
    loaded: Collection[GroupT],
    in_use: Collection[GroupT],
    coming: Iterable[GroupT],
) -> Choice[GroupT] | None:
    """Return how to load ``group``, which is needed now. None: what is ``in_use`` leaves no room for it."""
    missing = sizes[group] + sum(sizes[one] for one in loaded) - budget
    if missing <= 0:
        return Choice(group, ())
    evictable = set(loaded).difference(in_use)
    return _evicting(group, missing, sizes, _next_uses(evictable, coming))


def choose_ahead(
    sizes: Mapping[GroupT, int],
    budget: int,
    loaded: Collection[GroupT],
    unused: Collection[GroupT],
    in_use: Collection[GroupT],
    coming: Iterable[GroupT],
    ahead: int,
) -> Choice[GroupT] | None:
    """Return what to load before it is needed: the first of ``coming`` that isn't ``loaded``. None: nothing
    now.

    Not while ``ahead`` groups that come before it are loaded and ``unused``; and nothing that is used sooner is let go
    for it, nor what is ``in_use``.
    """
    if not ahead or len(loaded) == len(sizes):
        return None
    # Along the chain of coming uses up to the first group that is missing.
    waiting: set[GroupT] = set()
    seen: dict[GroupT, int] = {}
    chain = enumerate(coming)
    for position, group in chain:
        if group not in loaded:
            break
        seen.setdefault(group, position)
        if group in unused:
            waiting.add(group)
            if len(waiting) >= ahead:
                return None
    else:
        return None
    missing = sizes[group] + sum(sizes[one] for one in loaded) - budget
    if missing <= 0:
        return Choice(group, ())
    # What is used before the group stays.
    later = set(loaded).difference(in_use, seen)
    # The rest of the chain: only uses behind that of the group count.
    return _evicting(group, missing, sizes, _next_uses(later, (one for _, one in chain)))


def _next_uses(groups: set[GroupT], coming: Iterable[GroupT]) -> dict[GroupT, int]:
    """Return how far each of ``groups`` is from its next use, as far as can be seen."""
    found: dict[GroupT, int] = {}
    for position, group in enumerate(coming):
        if len(found) == len(groups):
            break
        if group in groups:
            found.setdefault(group, position)
    return {group: found.get(group, _NEVER) for group in groups}


def _evicting(
    group: GroupT, missing: int, sizes: Mapping[GroupT, int], next_uses: Mapping[GroupT, int]
) -> Choice[GroupT] | None:
    evicted = []
    # What is used last goes first; groups without bytes make no room.
    for candidate in sorted(next_uses, key=next_uses.__getitem__, reverse=True):
        if sizes[candidate]:
            evicted.append(candidate)
            missing -= sizes[candidate]
            if missing <= 0:
                return Choice(group, tuple(evicted))
    return None
