"""Loads groups in a background thread before they are used, within a budget of bytes."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from lockstep.errors import OffloadError, UsageError
from lockstep.offload.weights.groups import WeightGroup
from lockstep.offload.weights.mover import Mover, check_budget
from lockstep.offload.weights.schedule import Choice, Successors, choose_ahead, choose_urgent

# So many uses are looked ahead at most: what comes later is let go first, in any order.
_HORIZON = 1024


@dataclass
class Counters:
    """What a streamer has done so far."""

    loads: int = 0
    bytes_loaded: int = 0
    # Loads that were not foreseen: they began when the group was needed.
    urgent_loads: int = 0
    # How long computing threads waited for loads, foreseen or not.
    waited_s: float = 0.0
    # The most that was loaded at once.
    peak_bytes: int = 0


class Streamer:
    """Loads groups before they are used, and lets those go that will be used last, within ``budget`` bytes.

    It is told by ``forward_begins``, ``forward_ended`` and ``backward_begins`` (a ``GroupListener``) what is used, and
    learns the order from that. What it foresees wrongly costs time, nothing else.

    Args:
        groups: In order of registration.
        mover: Brings them.
        budget: Most bytes that are loaded at once, as ``mover.nbytes`` counts them.
        ahead: So many groups are loaded before they are used.
        ready: Called in the background thread before a group is loaded: returns when its weights at rest are those
            to be used.
        in_place: Weights are used where they are at rest: the mover is not needed for right results.

    Raises:
        OffloadError: ``budget`` is less than what is used at once.
    """

    def __init__(
        self,
        groups: Sequence[WeightGroup],
        mover: Mover,
        budget: int,
        ahead: int = 2,
        ready: Callable[[WeightGroup], None] | None = None,
        in_place: bool = False,
    ) -> None:
        self.groups = tuple(groups)
        self.mover = mover
        self.budget = budget
        self.ahead = ahead
        self.counters = Counters()
        self._ready = ready
        self._in_place = in_place
        self._sizes = {group: mover.nbytes(group) for group in self.groups}
        check_budget(self._sizes, budget)
        self._successors = Successors(self.groups)
        self._horizon = min(2 * len(self.groups) + 1, _HORIZON)
        self._loaded: set[WeightGroup] = set()
        # Loaded ahead, and not used since.
        self._unused: set[WeightGroup] = set()
        # Could not be let go when last tried.
        self._busy: set[WeightGroup] = set()
        # Being loaded or let go.
        self._moving: set[WeightGroup] = set()
        # By thread, in the order in which they began.
        self._in_use: dict[int, list[WeightGroup]] = {}
        self._current: WeightGroup | None = None
        # Computing threads wait for them.
        self._wanted: list[WeightGroup] = []
        # What went wrong when they were loaded ahead.
        self._failed: dict[WeightGroup, BaseException] = {}
        self._pid = os.getpid()
        self._ended = False
        # One thread, which ends with this object. It has been called, and has not begun to look.
        self._thread = ThreadPoolExecutor(1, "weight-streaming")
        self._is_called = False
        self._last_call: Future[None] = Future()
        # Guards everything above.
        self._changed = threading.Condition()

    # -- told by the model's hooks, in the computing thread ----------------------------------------------

    def forward_begins(self, group: WeightGroup) -> None:
        with self._changed:
            self._in_use.setdefault(threading.get_ident(), []).append(group)
        self.use(group)

    def forward_ended(self, group: WeightGroup) -> None:
        with self._changed:
            used = self._in_use.get(threading.get_ident(), [])
            # It is not there if an exception came before forward_begins.
            if group in used:
                # The use that began last: the same group may be in use several times.
                used.reverse()
                used.remove(group)
                used.reverse()

    def backward_begins(self, group: WeightGroup) -> None:
        self.use(group, in_backward=True)

    def pass_begins(self) -> None:
        """Begin a forward of the whole model: nothing is in use by this thread, whatever an interrupt left behind."""
        with self._changed:
            self._in_use.pop(threading.get_ident(), None)

    # ----------------------------------------------------------------------------------------------------

    def use(self, group: WeightGroup, in_backward: bool = False) -> None:
        """Have ``group`` loaded and bound. It stays so at least until another group is used.

        Raises:
            OffloadError: it could not be loaded, or what is in use leaves no room for it.
        """
        if self._ended or self._is_elsewhere():
            return
        with self._changed:
            self._successors.learn(group, in_backward)
            self._current = group
            # What could not be let go before may have become free.
            self._busy.clear()
            if not self._is_there(group):
                self._wait_for(group)
            self._unused.discard(group)
            if len(self._loaded) < len(self.groups):
                self._wake()
            if self._ended:
                return
        self.mover.bind(group)

    def finish(self) -> None:
        """Wait until everything is loaded that can be for now.

        Raises:
            Exception: whatever went wrong with groups that were not used since.
        """
        if not self._ended and not self._is_elsewhere():
            with self._changed:
                self._wake()
            self._last_call.result()
            with self._changed:
                for group in self._failed:
                    raise self._failed.pop(group)

    def close(self) -> None:
        """End the background thread and let go what is loaded; may be called again."""
        if self._ended or self._is_elsewhere():
            return
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.shutdown()
        self.mover.close()
        self._loaded.clear()
        self._unused.clear()

    def __reduce__(self) -> tuple[object, ...]:
        """Have copies of the streamed model, by deepcopy or pickle, not streamed."""
        if not self._in_place:
            raise UsageError(
                "A model whose weights are streamed to a device cannot be copied or pickled. First call "
                "stop_streaming(model), or save its state_dict()."
            )
        return type(None), ()

    # -- in the background thread ------------------------------------------------------------------------

    def work(self) -> None:
        """Load and let go what should be, until there is nothing to do."""
        with self._changed:
            self._is_called = False
        while (choice := self._next_choice()) is not None:
            try:
                self._carry_out(choice)
            except BaseException as error:
                # Raised in the computing thread, where the group is used.
                with self._changed:
                    self._failed[choice.load] = error
                    self._moving.difference_update((choice.load, *choice.evict))
                    self._changed.notify_all()

    def _next_choice(self) -> Choice[WeightGroup] | None:
        """Return what to do next; it is marked as moving."""
        with self._changed:
            if self._ended:
                return None
            choice = self._choose()
            if choice is not None:
                self._moving.update((choice.load, *choice.evict))
            return choice

    def _choose(self) -> Choice[WeightGroup] | None:
        in_use = self._busy | self._moving
        in_use.update(group for used in self._in_use.values() for group in used)
        for group in self._wanted:
            if group not in self._loaded and group not in self._moving and group not in self._failed:
                choice = choose_urgent(group, self._sizes, self.budget, self._loaded, in_use, self._coming())
                if choice is not None:
                    self.counters.urgent_loads += 1
                    return choice
                self._failed[group] = self._no_room(group)
                self._changed.notify_all()
        # The computing thread raises the error before anything else is loaded ahead.
        if self._failed:
            return None
        # As ``use`` promises, the last one stays until another is used.
        if self._current is not None:
            in_use.add(self._current)
        return choose_ahead(
            self._sizes, self.budget, self._loaded, self._unused, in_use, self._coming(), self.ahead
        )

    def _coming(self) -> Iterable[WeightGroup]:
        return self._successors.coming(self._horizon)

    def _carry_out(self, choice: Choice[WeightGroup]) -> None:
        room = True
        # Once one has to stay there will be no room, so the others stay as well.
        for group in choice.evict:
            released = room and self.mover.release(group)
            self._let_go(group, released)
            if not released:
                room = False
        if room:
            if self._ready is not None:
                self._ready(choice.load)
            self.mover.load(choice.load)
        with self._changed:
            self._moving.discard(choice.load)
            if room and not self._ended:
                self._count(choice.load)
            self._changed.notify_all()

    def _let_go(self, group: WeightGroup, released: bool) -> None:
        with self._changed:
            self._moving.discard(group)
            if released:
                self._loaded.discard(group)
                self._unused.discard(group)
            else:
                self._busy.add(group)
            self._changed.notify_all()

    def _count(self, group: WeightGroup) -> None:
        self._loaded.add(group)
        self._unused.add(group)
        self.counters.loads += 1
        self.counters.bytes_loaded += self._sizes[group]
        loaded = sum(self._sizes[one] for one in self._loaded)
        self.counters.peak_bytes = max(self.counters.peak_bytes, loaded)

    # -- with the condition held, in the computing thread ------------------------------------------------

    def _wake(self) -> None:
        """Let the thread look for work, soon."""
        if not self._is_called and not self._ended:
            self._is_called = True
            self._last_call = self._thread.submit(_work, weakref.ref(self))

    def _wait_for(self, group: WeightGroup) -> None:
        started = time.perf_counter()
        self._wanted.append(group)
        self._wake()
        try:
            self._changed.wait_for(lambda: self._is_there(group) or group in self._failed or self._ended)
        finally:
            self._wanted.remove(group)
            self.counters.waited_s += time.perf_counter() - started
        if group in self._failed:
            # There may be others to load, and other threads that wait for this one.
            self._wake()
            raise self._failed.pop(group)

    def _is_there(self, group: WeightGroup) -> bool:
        return group in self._loaded and group not in self._moving

    def _no_room(self, group: WeightGroup) -> OffloadError:
        taken = sorted(one.name for one in self._loaded)
        return OffloadError(
            f"'{group.name}' takes {self._sizes[group]} bytes, for which the budget of {self.budget} bytes has no "
            f"room while {', '.join(map(repr, taken))} are in use. Raise the budget, or keep no views of weights."
        )

    def _is_elsewhere(self) -> bool:
        """Return whether this is a fork of the streamer's process, in which no thread loads anything."""
        if os.getpid() == self._pid:
            return False
        if self._in_place:
            # Weights are read where they are.
            return True
        raise UsageError(
            "A model whose weights are streamed to a device is used in a forked process. "
            "Load it there, or call stop_streaming(model) before the fork."
        )


def _work(reference: weakref.ref[Streamer]) -> None:
    # The streamer may go while the thread has nothing to do.
    streamer = reference()
    if streamer is not None:
        streamer.work()
