"""Which machines train together, in which round, with which ranks. Pure: events and the time in, actions out.

A launch is a series of rounds. In each round a fixed set of machines runs the script; when a worker or a
machine fails, or a machine comes to an elastic launch, the round ends on all of them and the next is formed.
``now`` is the receiver's own time while it was awake; no clock of another machine is ever compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LAST_CALL_S = 3.0
# Without a word of the other: the migration of a virtual machine, or a pause by hand, is no loss.
HEARTBEAT_LIMIT_S = 30.0
# The host waits longer than a launcher waits for the host, so that two never train at once.
LONGER = 1.25
JOIN_LIMIT_S = 900.0


@dataclass(frozen=True)
class JoinRequest:
    """What a launcher says of itself when it joins. ``address:port`` is where it could host the round's store.

    ``run`` describes what it launches; ``rank`` is its ``machine_rank`` or None; ``epoch`` is that of the launch
    in which it took part before, empty for a newcomer.
    """

    machine: str
    name: str
    run: str
    nproc: int
    address: str
    port: int
    rank: int | None = None
    epoch: str = ""


# -- actions -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeAssignment:
    """A machine's place in a round: its number among the machines and the rank of its first worker."""

    request: JoinRequest
    group_rank: int
    base_rank: int


@dataclass(frozen=True)
class RoundStarted:
    """Start the workers of round ``number``; they meet at ``address:port``."""

    number: int
    nodes: tuple[NodeAssignment, ...]
    world_size: int

    @property
    def address(self) -> str:
        return self.nodes[0].request.address

    @property
    def port(self) -> int:
        return self.nodes[0].request.port


@dataclass(frozen=True)
class NodeEnded:
    """These machines must end their workers of the round and join again."""

    number: int
    machines: tuple[str, ...]


@dataclass(frozen=True)
class RoundCompleted:
    """All workers of the round ended well."""

    number: int


@dataclass(frozen=True)
class NodeLost:
    """A machine is gone; ``from_round`` is the round that it broke, None if it was in none."""

    request: JoinRequest
    why: str
    from_round: int | None


@dataclass(frozen=True)
class NodeWaiting:
    """A machine waits to be let into the running round ``number``, which must end for that."""

    request: JoinRequest
    number: int


@dataclass(frozen=True)
class JoinRefused:
    """A machine is not let in; ``later``: it may try again, since the reason can pass."""

    machine: str
    sentence: str
    later: bool = False


@dataclass(frozen=True)
class JoinTimeout:
    """Too few machines came in time."""

    sentence: str


MembershipAction = (
    RoundStarted | NodeEnded | RoundCompleted | NodeLost | NodeWaiting | JoinRefused | JoinTimeout
)


class Phase(Enum):
    """Where a machine stands."""

    WAITING = "waits for a round"
    RUNNING = "runs workers"
    FINISHED = "its workers ended well"
    ENDING = "ends its workers"


@dataclass
class Member:
    """A machine that is here. ``order`` counts arrivals, ``seen`` is when it was last heard."""

    request: JoinRequest
    order: int
    seen: float
    phase: Phase = Phase.WAITING


class Membership:
    """The state of a launch on ``least`` to ``most`` machines; ``first`` hosts the coordinator and always has rank 0.

    Args:
        epoch: a word made for this launch alone.
        run: what is launched; machines that launch something else are refused.
        last_call_s: how long a first round waits for more machines once there are ``least``.
        heartbeat_limit_s: how long a launcher waits for a word of the host; see ``LONGER``.
    """

    def __init__(
        self,
        least: int,
        most: int,
        epoch: str,
        run: str,
        first: str,
        now: float,
        last_call_s: float = LAST_CALL_S,
        heartbeat_limit_s: float = HEARTBEAT_LIMIT_S,
        join_limit_s: float = JOIN_LIMIT_S,
    ) -> None:
        self._least, self._most = least, most
        self.epoch = epoch
        self._run, self._first = run, first
        self._last_call_s, self._join_limit_s = last_call_s, join_limit_s
        self._dead_after_s = LONGER * heartbeat_limit_s
        self._now = now
        self._gathering_since = now
        self._enough_since: float | None = None
        self._arrivals = 0
        self._closed = False
        self.members: dict[str, Member] = {}
        self.round: RoundStarted | None = None
        self.rounds = 0
        """How many rounds were formed."""

    # -- events: each takes the time in (monotonic seconds), and returns what must be done now ---------------

    def join(self, request: JoinRequest, now: float) -> list[MembershipAction]:
        """Return a machine is here and has no workers."""
        self._advance(now)
        # Any event may be the one that the next round has waited for, so each tries to form it.
        return self._join(request) + self._form()

    def heartbeat(self, machine: str, now: float) -> list[MembershipAction]:
        """Return a machine is alive."""
        self._advance(now)
        if machine in self.members:
            self.members[machine].seen = self._now
        return self._form()

    def lose(self, machine: str, now: float, why: str = "its connection closed") -> list[MembershipAction]:
        """Return a machine is gone: it said so, or its connection closed."""
        self._advance(now)
        return self._lose(machine, why) + self._form()

    def finish(self, machine: str, number: int, now: float) -> list[MembershipAction]:
        """Note that all workers of a machine ended well, in this round."""
        self._advance(now)
        return self._finish(machine, number) + self._form()

    def fail(self, number: int, now: float) -> list[MembershipAction]:
        """End this round, which cannot go on."""
        self._advance(now)
        is_current = self.round is not None and self.round.number == number
        return (self._end_round() if is_current else []) + self._form()

    def close(self) -> None:
        """Note that the launch is over; nobody is let in any more."""
        self._closed = True

    def tick(self, now: float) -> list[MembershipAction]:
        """Time went by."""
        self._advance(now)
        return self._expire_members() + self._form()

    # -- what follows --------------------------------------------------------------------------------------

    def lacking(self) -> str:
        """Describe whom the next round waits for; empty where there are enough machines."""
        ranks = {member.request.rank for member in self.members.values()}
        missing = [rank for rank in range(self._most) if rank not in ranks]
        number = self._least - len(self.members)
        if number <= 0:
            return ""
        if None not in ranks and self._least == self._most and missing:
            return f"machine{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"{number} more machine{'' if number == 1 else 's'}"

    def _advance(self, now: float) -> None:
        self._now = max(now, self._now)

    def _join(self, request: JoinRequest) -> list[MembershipAction]:
        refusal = self._refusal(request)
        if refusal is not None:
            return [refusal]
        actions: list[MembershipAction] = []
        known = self.members.get(request.machine)
        if known is not None:
            if known.phase in (Phase.RUNNING, Phase.FINISHED) and self.round is not None:
                # It left the round on its own.
                actions += self._end_round()
            known.request, known.seen, known.phase = request, self._now, Phase.WAITING
            return actions
        self._arrivals += 1
        self.members[request.machine] = Member(request, self._arrivals, self._now)
        if self.round is not None:
            # A fixed launch has no place left by now; an elastic one ends its round for it.
            actions.append(NodeWaiting(request, self.round.number))
        return actions

    def _refusal(self, request: JoinRequest) -> JoinRefused | None:
        def refused(sentence: str, later: bool = False) -> JoinRefused:
            return JoinRefused(request.machine, sentence, later)

        if self._closed:
            return refused("the launch is over. Start all of its machines again.")
        # It may be a launcher that missed the end of its launch and now finds another one at the same address.
        if request.epoch not in ("", self.epoch):
            return refused("this machine belongs to an earlier launch. Start `lockstep launch` here again.")
        if request.run != self._run:
            return refused(
                f"the launch there is {self._run}, but here it is {request.run}. Start the same script on all "
                "machines, or give one of the launches another main_process_port."
            )
        others = [m for name, m in self.members.items() if name != request.machine]
        if request.rank is not None:
            if request.rank >= self._most:
                return refused(
                    f"machine_rank {request.rank} is too large for {self._most} machines, whose ranks are 0 to "
                    f"{self._most - 1}. Correct it."
                )
            for other in others:
                if other.request.rank == request.rank:
                    return refused(
                        f"machine_rank {request.rank} is taken by {other.request.name}. Give each machine a "
                        "machine_rank of its own.",
                        later=True,
                    )
        if len(others) >= self._most:
            return refused(
                f"all {self._most} machines have joined already. Raise num_machines, or do not start this "
                "machine.",
                later=True,
            )
        return None

    def _lose(self, machine: str, why: str) -> list[MembershipAction]:
        member = self.members.pop(machine, None)
        if member is None:
            return []
        # A machine that only waits may leave without harm. One of the running round may not, even if its workers are
        # done: the others may need them, such as for a checkpoint.
        broken = member.phase in (Phase.RUNNING, Phase.FINISHED) and self.round is not None
        number = self.round.number if broken and self.round is not None else None
        missing = NodeLost(member.request, why, number)
        return [missing, *self._end_round()] if broken else [missing]

    def _expire_members(self) -> list[MembershipAction]:
        actions: list[MembershipAction] = []
        for machine, member in list(self.members.items()):
            silent_s = self._now - member.seen
            # The host's own launcher is this process.
            if machine != self._first and silent_s > self._dead_after_s:
                actions += self._lose(machine, f"it was silent for {silent_s:.0f} s")
        if self.round is None and not self._closed and self._now - self._gathering_since > self._join_limit_s:
            # Only between rounds: while a round runs, nobody has to come.
            self._closed = True
            whom = self.lacking() or "those of the last round"
            limit_s = f"{self._join_limit_s:.0f}"
            actions.append(
                JoinTimeout(f"{whom} did not come within {limit_s} s. Start it, or fewer machines.")
            )
        return actions

    def _finish(self, machine: str, number: int) -> list[MembershipAction]:
        member = self.members.get(machine)
        is_current = self.round is not None and self.round.number == number
        if member is None or not is_current or member.phase is not Phase.RUNNING:
            return []
        assert self.round is not None
        member.phase = Phase.FINISHED
        # The round is complete when the last machine says so.
        if any(self.members[node.request.machine].phase is not Phase.FINISHED for node in self.round.nodes):
            return []
        self._leave_round()
        return [RoundCompleted(number)]

    def _end_round(self) -> list[MembershipAction]:
        assert self.round is not None
        return [NodeEnded(self.round.number, self._leave_round())]

    def _leave_round(self) -> tuple[str, ...]:
        assert self.round is not None
        machines = tuple(s.request.machine for s in self.round.nodes if s.request.machine in self.members)
        for machine in machines:
            self.members[machine].phase = Phase.ENDING
        self.round = None
        self._gathering_since, self._enough_since = self._now, None
        return machines

    def _form(self) -> list[MembershipAction]:
        # Nobody starts while a machine still ends workers of the round before, which new ones could meet.
        waiting = [member for member in self.members.values() if member.phase is Phase.WAITING]
        if self.round is not None or self._closed or len(waiting) < len(self.members):
            return []
        # Without the machine that hosts the coordinator there is no address at which workers could meet.
        if len(waiting) < self._least or self._first not in self.members:
            self._enough_since = None
            return []
        if self._enough_since is None:
            self._enough_since = self._now
        # Those of an earlier round are all back: who comes later makes the round re-form.
        patient = self.rounds == 0 and len(waiting) < self._most
        if patient and self._now - self._enough_since < self._last_call_s:
            return []
        self.round = self._assign_ranks(waiting)
        self.rounds += 1
        for member in waiting:
            member.phase = Phase.RUNNING
        return [self.round]

    def _assign_ranks(self, members: list[Member]) -> RoundStarted:
        def order(member: Member) -> tuple[bool, int, int]:
            request = member.request
            return (
                request.machine != self._first,
                self._most if request.rank is None else request.rank,
                member.order,
            )

        # The machine that hosts comes first, then those with numbers, then the others as they came: who was here in
        # the round before keeps its place as long as nobody before it leaves.
        nodes: list[NodeAssignment] = []
        base = 0
        for member in sorted(members, key=order):
            nodes.append(NodeAssignment(member.request, len(nodes), base))
            base += member.request.nproc
        return RoundStarted(self.rounds, tuple(nodes), base)
