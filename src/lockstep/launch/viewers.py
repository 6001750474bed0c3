"""People who look on a launch: the coordinator's handler "top", which tells them how it stands and takes their wishes.

::

    viewer -> coordinator   top.look     its version of Lockstep
    coordinator -> viewer   top.view     how the launch stands; top.refused: why it is not told
    viewer -> coordinator   top.stacks | top.stop
    coordinator -> viewer   top.stack    for each rank that answers, what it does and its Python stack
    coordinator -> all      top.said     a sentence: what came of a wish

Whoever knows the launch's secret may look and ask. Nothing is sent that was not asked for, but for sentences.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import lockstep
from lockstep.errors import ControlError
from lockstep.observe.hang.records import Evidence
from lockstep.observe.hang.wording import describe_line

CAUSE = "a request of lockstep top"
MOST_SENTENCES = 20
MOST_VIEWERS = 16


class ViewerConnection(Protocol):
    """One viewer's connection."""

    data: dict[str, object]

    def send(self, message: Mapping[str, object]) -> None: ...
    def close(self) -> None: ...


class WatchOfRanks(Protocol):
    """What viewers ask of the watch of the workers."""

    at_answer: Callable[[Evidence], None]

    def standing(self) -> list[dict[str, object]]: ...
    def latest(self) -> Mapping[str, float | str]: ...
    def request_stacks(self) -> int: ...


class RunViewers:
    """The handler "top".

    Args:
        watch: Of the workers.
        stop: Has all ranks stop at a step boundary, for a cause; returns why not, in a clause, or "".
        run: Describes the launch.
    """

    def __init__(self, watch: WatchOfRanks, stop: Callable[[str], str], run: str) -> None:
        self._watch = watch
        self._stop = stop
        self._run = run
        self._began = time.time()
        self._viewers: list[ViewerConnection] = []
        self._want_stacks: list[ViewerConnection] = []
        self._sentences: deque[tuple[float, str]] = deque(maxlen=MOST_SENTENCES)
        watch.at_answer = self._stack

    # -- control.Handler --------------------------------------------------------------------------------

    def received(self, peer: ViewerConnection, message: Mapping[str, object]) -> None:
        """Take in a wish."""
        verb = str(message.get("kind", "")).partition(".")[2]
        if verb == "look":
            self._answer_viewer(peer, message)
        elif peer not in self._viewers:
            raise ControlError(
                "A viewer sent a request before it had connected. Use the same version of Lockstep on all machines."
            )
        elif verb == "stacks":
            self._ask_for_stacks(peer)
        elif verb == "stop":
            self._answer(peer, self._stop(CAUSE), "All ranks stop at the next step boundary.")

    def lost(self, peer: ViewerConnection) -> None:
        """Note that a viewer is gone."""
        for viewers in (self._viewers, self._want_stacks):
            if peer in viewers:
                viewers.remove(peer)

    def tick(self, now: float) -> None:
        """There is nothing to do."""

    # -- what they are told ------------------------------------------------------------------------------

    def say(self, sentence: str) -> None:
        """Tell all viewers, now and later, what was said of the run. In the thread of the handlers."""
        self._sentences.append((time.time(), sentence))
        for viewer in self._viewers:
            viewer.send({"kind": "top.said", "sentence": sentence})

    def _answer_viewer(self, peer: ViewerConnection, message: Mapping[str, object]) -> None:
        why_not = ""
        if message.get("version") != lockstep.__version__:
            why_not = (
                f"it runs Lockstep {lockstep.__version__}, and this is {str(message.get('version'))[:40]}"
            )
        elif peer not in self._viewers and len(self._viewers) >= MOST_VIEWERS:
            why_not = f"{MOST_VIEWERS} others are connected already"
        if why_not:
            peer.send({"kind": "top.refused", "sentence": why_not})
            peer.close()
            return
        if peer not in self._viewers:
            self._viewers.append(peer)
        peer.send(
            {
                "kind": "top.view",
                "run": self._run,
                "elapsed_s": max(time.time() - self._began, 0.0),
                "latest": dict(self._watch.latest()),
                "ranks": self._watch.standing(),
                "sentences": [{"time": when, "sentence": sentence} for when, sentence in self._sentences],
            }
        )

    def _answer(self, peer: ViewerConnection, why_not: str, done: str) -> None:
        if why_not:
            peer.send({"kind": "top.said", "sentence": f"The request was refused: {why_not}."})
        else:
            self.say(done)

    def _ask_for_stacks(self, peer: ViewerConnection) -> None:
        if peer not in self._want_stacks:
            self._want_stacks.append(peer)
        if not self._watch.request_stacks():
            peer.send({"kind": "top.said", "sentence": "No rank is running, so the request cannot be sent."})

    def _stack(self, evidence: Evidence) -> None:
        message = {
            "kind": "top.stack",
            "rank": evidence.rank,
            "host": evidence.host,
            "pid": evidence.pid,
            "place": describe_line(evidence.place),
            "call": evidence.call,
            "stack": evidence.stack,
        }
        for viewer in self._want_stacks:
            viewer.send(message)
