"""The coordinator of a launch: one server, to which launchers tell what happens, and which tells them what to do.

Its handler "rendezvous" feeds :class:`~lockstep.launch.membership.Membership`; the handler "watch" hears the
workers. All of it runs in the server's thread.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.config.files import JsonObject
from lockstep.errors import ControlError
from lockstep.launch import membership as m
from lockstep.launch.report import Restarts
from lockstep.runtime.failure import HANG, PREEMPTED, of_signal

# A rank that only lost contact is not the cause; how long the cause has to be told.
CAUSE_WAIT_S = 1.5
JOINING = "a machine that joins"


class NodeConnection(Protocol):
    """One launcher's connection."""

    data: JsonObject

    def send(self, message: Mapping[str, object]) -> None: ...


class Watch(Protocol):
    """What the coordinator asks of the watch of the workers."""

    commits: int
    stopped: str | None

    @property
    def verdict(self) -> Any: ...
    @property
    def steps(self) -> int: ...
    @property
    def nothing_begun(self) -> bool: ...
    def start_round(self, world_size: int) -> None: ...
    def request_stop(self, cause: str) -> None: ...
    def left(self, rank: int) -> None: ...
    def end_all(self, reason: str, sentence: str = "", rank: int | None = None) -> None: ...


@dataclass(frozen=True)
class RoundFailure:
    """How a round failed: a clause for people, the launch's exit code if no other round follows, whom to blame, what
    that rank said."""

    cause: str
    code: int
    rank: int | None = None
    summary: str = ""


class LaunchCoordinator:
    """The handler "rendezvous".

    Args:
        members: who is here.
        restarts: whether a failure is followed by another round.
        watch: hears the workers; None where nobody watches them.
        grace_s: from a stop signal to the end of whatever still runs.
        elastic: a machine that leaves does not end the launch.
        say: prints one sentence for people.
    """

    def __init__(
        self,
        members: m.Membership,
        restarts: Restarts,
        watch: Watch | None,
        grace_s: float,
        elastic: bool,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._restarts = restarts
        self._watch = watch
        self._grace_s = grace_s
        self._elastic = elastic
        self._say = say
        self._clock = clock
        self._peers: dict[str, NodeConnection] = {}
        self._codes: list[int] = []
        self._suspect: tuple[float, RoundFailure] | None = None
        self._stop: tuple[float, str] | None = None
        self._reform: float | None = None
        self._over: dict[str, object] | None = None

    # -- control.Handler --------------------------------------------------------------------------------

    def received(self, peer: NodeConnection, message: Mapping[str, object]) -> None:
        """Take in what a launcher tells."""
        verb = str(message.get("kind", "")).partition(".")[2]
        if verb == "join":
            self._join(peer, join_request_of(message))
            return
        machine = peer.data.get("machine")
        # A launcher that connected anew has another connection: what still comes through the old one is out of date.
        if machine is None or self._peers.get(machine) is not peer:
            return
        if verb == "heartbeat":
            self._act_all(self._members.heartbeat(machine, self._clock()))
            peer.send({"kind": "rendezvous.heartbeat"})
        elif verb == "finished":
            self._codes.append(_non_negative_int(message, "code"))
            self._act_all(self._members.finish(machine, _non_negative_int(message, "round"), self._clock()))
        elif verb == "failed":
            self._failed(message)
        elif verb == "left" and self._watch is not None:
            current = self._members.round
            if current is not None and _non_negative_int(message, "round") == current.number:
                self._watch.left(_non_negative_int(message, "rank"))
        elif verb == "stop":
            self._stop_wanted(str(message.get("signal", "")))
        elif verb == "leave":
            self._leave(machine, str(message.get("signal", "")), _non_negative_int(message, "code"))

    def lost(self, peer: NodeConnection) -> None:
        """Note that a launcher's connection is gone."""
        machine = peer.data.get("machine")
        if machine is not None and self._peers.get(machine) is peer:
            del self._peers[machine]
            self._act_all(self._members.lose(machine, self._clock()))

    def tick(self, now: float) -> None:
        """Look at the time."""
        self._act_all(self._members.tick(self._clock()))
        if self._over is not None:
            return
        # The cause has had its time, so the rank that was heard first is blamed.
        if self._suspect is not None and now >= self._suspect[0]:
            self._fail(self._suspect[1])
        if self._stop is not None and self._watch is not None and self._watch.nothing_begun:
            self._end(PREEMPTED, nothing_to_save(self._stop[1]))
        if self._stop is not None and now >= self._stop[0]:
            name = self._stop[1]
            # Before any rank has completed a step there is nothing to save.
            code = signal_code(name) if self._watch is None or self._watch.steps else PREEMPTED
            cause = f"{name}, but not all ranks stopped within {self._grace_s:g} s"
            stopped = self._watch.stopped if self._watch is not None else None
            self._end(code, f"{cause}. {stopped}" if stopped else f"{cause}; nothing was saved")
        # Workers that do not reach a step boundary in time are ended, so that the newcomer can start.
        if self._reform is not None and now >= self._reform:
            self._end_round()
        verdict = self._watch.verdict if self._watch is not None else None
        if verdict is not None and self._members.round is not None:
            self._fail(RoundFailure(f"it hung: {str(verdict.sentence).rstrip('.')}", HANG))

    # -- from the launcher that hosts ------------------------------------------------------------------

    def interrupt(self, name: str, code: int) -> None:
        """End the launch everywhere with this code, because the machine that hosts got this signal."""
        self._end(code, f"ended by {name}")

    def alone(self) -> bool:
        """Return whether no launcher is connected any more."""
        return not self._peers

    # -- machines --------------------------------------------------------------------------------------

    def _join(self, peer: NodeConnection, request: m.JoinRequest) -> None:
        peer.data["machine"] = request.machine
        # It came too late: it hears how the launch ended, as the others did.
        if self._over is not None:
            peer.send(self._over)
            return
        self._peers[request.machine] = peer
        peer.send({"kind": "rendezvous.admitted", "epoch": self._members.epoch})
        self._act_all(self._members.join(request, self._clock()))
        whom = self._members.lacking()
        if whom and self._members.round is None and request.machine in self._members.members:
            peer.send({"kind": "rendezvous.waiting", "whom": whom})

    def _leave(self, machine: str, name: str, code: int) -> None:
        member = self._members.members.get(machine)
        if self._elastic:
            self._act_all(self._members.lose(machine, self._clock(), f"ended there by {name}"))
        elif member is not None:
            self._end(code or signal_code(name), f"ended by {name} on {member.request.name}")

    def _act_all(self, actions: list[m.MembershipAction]) -> None:
        for action in actions:
            self._act(action)

    def _act(self, action: m.MembershipAction) -> None:
        match action:
            case m.RoundStarted():
                self._start(action)
            case m.NodeEnded(number, machines):
                self._send_to(machines, {"kind": "rendezvous.end", "round": number})
            case m.RoundCompleted():
                self._complete()
            case m.NodeLost(request, why, broken) if broken is not None:
                self._fail(RoundFailure(f"machine {request.name} was lost ({why})", 1))
            case m.NodeWaiting(request):
                self._admit(request)
            case m.JoinRefused(machine, sentence, later):
                refused = {"kind": "rendezvous.refused", "sentence": sentence, "later": later}
                self._send_to((machine,), refused)
                self._peers.pop(machine, None)
            case m.JoinTimeout(sentence):
                self._end(1, sentence)

    # -- rounds ----------------------------------------------------------------------------------------

    def _start(self, formed: m.RoundStarted) -> None:
        self._codes, self._suspect, self._reform = [], None, None
        self._restarts.round_started(self._commits())
        if self._watch is not None:
            self._watch.start_round(formed.world_size)
        for node in formed.nodes:
            self._send_to(
                (node.request.machine,),
                {
                    "kind": "rendezvous.round",
                    "number": formed.number,
                    "group_rank": node.group_rank,
                    "base_rank": node.base_rank,
                    "machines": len(formed.nodes),
                    "world_size": formed.world_size,
                    "address": formed.address,
                    "port": formed.port,
                },
            )

    def _complete(self) -> None:
        # Ranks that stopped for a newcomer have saved their state and end with a code, but the launch goes on.
        code = max(self._codes, default=0)
        if self._reform is not None and code != 0:
            self._send_to(tuple(self._peers), {"kind": "rendezvous.end", "round": self._members.rounds - 1})
            return
        stopped = self._watch.stopped if self._watch is not None else None
        if self._stop is not None and self._watch is not None and self._watch.nothing_begun:
            stopped = nothing_to_save(self._stop[1])
        self._end(code, (stopped or "all ranks stopped and saved their state") if code else "")

    def _admit(self, request: m.JoinRequest) -> None:
        """Let a newcomer in: at a step boundary where workers can stop at one, else at once."""
        self._say(f"lockstep: machine {request.name} joins; all workers start again in a new round.")
        # The round is about to end already.
        if self._stop is not None or self._reform is not None:
            return
        if self._watch is not None and self._watch.steps:
            self._watch.request_stop(JOINING)
            self._reform = self._clock() + self._grace_s
            self._send_to(tuple(self._peers), {"kind": "rendezvous.stopping", "signal": ""})
        else:
            self._end_round()

    def _failed(self, message: Mapping[str, object]) -> None:
        current = self._members.round
        if current is None or _non_negative_int(message, "round") != current.number:
            return
        rank, code = _non_negative_int(message, "rank"), _non_negative_int(message, "code")
        where = f" on {message.get('host')}" if len(current.nodes) > 1 else ""
        summary = str(message.get("summary"))
        failure = RoundFailure(f"rank {rank}{where} failed ({summary}){self._at_step()}", code, rank, summary)
        stopped = self._watch.stopped if self._watch is not None else None
        # The workers were asked to stop for a newcomer; what fails while they do is no failure of the run.
        if self._reform is not None:
            self._end_round()
        elif stopped is not None:
            self._end(code, stopped)
        elif message.get("consequence"):
            # Heard sooner than the rank whose end it is a consequence of: that one is waited for, and then blamed.
            self._suspect = self._suspect or (self._clock() + CAUSE_WAIT_S, failure)
        else:
            self._fail(failure)

    def _fail(self, failure: RoundFailure) -> None:
        if self._over is not None:
            return
        self._suspect = None
        # Somebody wants the launch to end, so no further round follows.
        if self._stop is not None:
            self._end(failure.code, failure.cause, rank=failure.rank)
            return
        decision = self._restarts.round_failed(failure.cause, self._commits())
        if decision.again:
            self._say(f"lockstep: {decision.sentence}.")
            self._end_round(failure)
        else:
            self._end(failure.code, failure.cause, decision.sentence, failure.rank, failure.summary)

    def _end_round(self, failure: RoundFailure | None = None) -> None:
        self._suspect = self._reform = None
        if self._watch is not None:
            self._end_workers(failure or RoundFailure("", 0))
        if self._members.round is not None:
            self._act_all(self._members.fail(self._members.round.number, self._clock()))

    def _end_workers(self, failure: RoundFailure) -> None:
        assert self._watch is not None
        # The watch has told the workers.
        if failure.code == HANG:
            self._watch.end_all("hang")
        elif failure.cause:
            self._watch.end_all("error", failure.summary or failure.cause, failure.rank)
        else:
            self._watch.end_all("another round")

    def _commits(self) -> int | None:
        return self._watch.commits if self._watch is not None else None

    def _at_step(self) -> str:
        steps = self._watch.steps if self._watch is not None else 0
        return f" after {steps} steps of its round" if steps else ""

    # -- the end -----------------------------------------------------------------------------------------

    def _stop_wanted(self, name: str) -> None:
        if self._stop is not None or self._over is not None:
            return
        if self._watch is None:
            self._end(signal_code(name), f"ended by {name}")
        elif self._members.round is None:
            self._end(PREEMPTED, nothing_to_save(name))
        else:
            self._stop = self._clock() + self._grace_s, name
            # A stop goes before a new round.
            self._reform = None
            shown = name if name.startswith("SIG") else ""
            self._send_to(tuple(self._peers), {"kind": "rendezvous.stopping", "signal": shown})
            self._watch.request_stop(name)

    def _end(self, code: int, cause: str, note: str = "", rank: int | None = None, summary: str = "") -> None:
        if self._over is not None:
            return
        self._over = {"kind": "rendezvous.over", "code": code, "cause": cause, "note": note, "rank": rank}
        # After a good end or a stop workers end by themselves.
        if self._watch is not None and code not in (0, PREEMPTED):
            self._end_workers(RoundFailure(cause, code, rank, summary))
        self._send_to(tuple(self._peers), self._over)
        self._members.close()

    def _send_to(self, machines: tuple[str, ...], message: Mapping[str, object]) -> None:
        if self._over is not None and message is not self._over:
            # They were told something more important.
            return
        for machine in machines:
            if machine in self._peers:
                self._peers[machine].send(message)


def join_request_of(message: Mapping[str, object]) -> m.JoinRequest:
    """Return the join request in a message. Raises ControlError when it does not have the form of one."""
    rank = message.get("rank")
    request = m.JoinRequest(
        machine=_text(message, "machine"),
        name=_text(message, "name"),
        run=_text(message, "run"),
        nproc=_non_negative_int(message, "nproc"),
        address=_text(message, "address"),
        port=_non_negative_int(message, "port"),
        rank=None if rank is None else _non_negative_int(message, "rank"),
        epoch=_text(message, "epoch"),
    )
    if not request.machine or request.nproc < 1:
        raise ControlError(
            "A launcher's message is not complete. Use one version of Lockstep on all machines."
        )
    return request


def nothing_to_save(name: str) -> str:
    """Why a launch ended that was stopped before its first step, or whose script has no ``Accelerator``."""
    return f"ended by {name} before the first step of an Accelerator; nothing was saved"


def signal_code(name: str) -> int:
    """Return the exit code of a launch that a signal ended."""
    return of_signal(int(getattr(signal, name, signal.SIGTERM)) if name.startswith("SIG") else signal.SIGTERM)


def _text(message: Mapping[str, object], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) > 1000:
        raise ControlError(
            f"A launcher's message has no text {name}. Use one version of Lockstep on all machines."
        )
    return value


def _non_negative_int(message: Mapping[str, object], name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ControlError(
            f"A launcher's message has no number {name}. Use one version of Lockstep on all machines."
        )
    return value
