"""What a pipeline does when: actions, one after the other on each rank, and the time that nobody works.

An action waits for what it needs and for its rank, and sending takes no time:

- forward of a stage needs the micro-batch's forward of the stage before,
- backward needs its forward, and backward of the stage behind (of the input, where backward is split),
- the weights' part of backward needs the input's part.

Stages are numbered through the whole model; a rank may have several (virtual stages).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.errors import UsageError

KINDS = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}


class Action(NamedTuple):
    """One piece of work. ``kind`` is a key of ``KINDS``: ``B`` is ``I`` and ``W`` in one.

    ``paired``: its result is sent only after the rank's next action (DualPipeV's overlapped forward and backward).
    """

    rank: int
    stage: int
    kind: str
    micro_batch: int
    paired: bool = False


class ScheduleResult(NamedTuple):
    """What ``F``, ``I`` or ``W`` of a stage gives for a micro-batch."""

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Times:
    """How long a stage takes for a micro-batch, in any unit. ``B`` takes ``input + weight``."""

    forward: float = 1
    input: float = 1
    weight: float = 1

    def duration(self, kind: str) -> float:
        parts = {"F": self.forward, "I": self.input, "W": self.weight, "B": self.input + self.weight}
        return parts[kind]


class Span(NamedTuple):
    """When an action ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Each rank's actions in time; the first begins at 0."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first action's start to the last one's end, over all ranks."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0)

    def busy(self, rank: int) -> float:
        """Return the time in which ``rank`` works."""
        return sum(span.end - span.start for span in self.ranks[rank])

    def idle(self, rank: int) -> float:
        """Return the time in which ``rank`` does not work while some rank does, or will."""
        return self.makespan - self.busy(rank)

    def waits(self, rank: int) -> float:
        """Return the part of ``idle`` between the rank's first action and its last."""
        spans = self.ranks[rank]
        return spans[-1].end - spans[0].start - self.busy(rank) if spans else 0

    @property
    def bubble(self) -> float:
        """Idle / (idle + useful), over all ranks, while any of them works."""
        return self._share([self.idle(rank) for rank in range(len(self.ranks))])

    @property
    def inner_bubble(self) -> float:
        """The same without what is before a rank's first action and after its last.

        It is what remains when ranks begin the next step without waiting for each other, as the zero-bubble paper
        counts (which takes the rank that is longest at it; this is over all ranks).
        """
        return self._share([self.waits(rank) for rank in range(len(self.ranks))])

    def in_flight(self, rank: int) -> int:
        """Return the most (stage, micro-batch) pairs whose activations ``rank`` holds at a time: from F
        until B or W.
        """
        in_memory = most = 0
        for span in self.ranks[rank]:
            # A micro-batch's activations are kept until the backward of its weights.
            in_memory += {"F": 1, "B": -1, "W": -1, "I": 0}[span.action.kind]
            most = max(most, in_memory)
        return most

    def _share(self, idle: Sequence[float]) -> float:
        useful = sum(self.busy(rank) for rank in range(len(self.ranks)))
        return sum(idle) / (sum(idle) + useful) if useful else 0.0


def by_rank(records: Iterable[Sequence[int | str]]) -> list[list[Action]]:
    """Divide records (rank, stage, kind, micro-batch), each rank's in its order, into a list for each rank.

    Raises:
        UsageError: a record is not of this form.
    """
    actions = [_action(record) for record in records]
    count = max((action.rank for action in actions), default=-1) + 1
    return [[action for action in actions if action.rank == rank] for rank in range(count)]


def _action(record: Sequence[int | str]) -> Action:
    rank, stage, kind, batch = record if len(record) == 4 else (None, None, None, None)
    if isinstance(rank, int) and isinstance(stage, int) and isinstance(batch, int) and kind in KINDS:
        action = Action(rank, stage, str(kind), batch)
        if min(rank, stage, batch) >= 0:
            return action
    raise UsageError(
        f"{tuple(record)} is not an action. Give (rank, stage, kind, micro-batch), with a kind of {', '.join(KINDS)} "
        "and numbers from 0."
    )


def simulate(orders: Sequence[Sequence[Action]], times: Times = Times()) -> Timeline:
    """Return the timeline of ``orders``: element r has the actions of rank r, one after the other.

    Raises:
        UsageError: an action is there twice, or waits for something that never runs.
    """
    _check_unique(orders)
    owner = {action.stage: action.rank for order in orders for action in order}
    stages = 1 + max(owner, default=-1)
    # When its own rank has it.
    here: dict[ScheduleResult, float] = {}
    # When the others have it.
    sent: dict[ScheduleResult, float] = {}
    ranks: list[list[Span]] = [[] for _ in orders]
    progress = True
    # Each rank goes as far as it can, in turn: in which order has no influence on the times.
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            spans = ranks[rank]
            while len(spans) < len(order):
                action = order[len(spans)]
                wanted = needs(action, stages)
                ready = [(here if owner.get(need.stage) == rank else sent).get(need) for need in wanted]
                if None in ready:
                    break
                start = max([spans[-1].end if spans else 0, *(time for time in ready if time is not None)])
                spans.append(Span(action, start, start + times.duration(action.kind)))
                here.update(dict.fromkeys(results(action), spans[-1].end))
                # The last action of a rank has none behind it to be sent with.
                if not action.paired or len(spans) == len(order):
                    _publish_results(spans, sent)
                progress = True
    _check_finished(orders, ranks, stages, here)
    return Timeline(tuple(map(tuple, ranks)))


def needs(action: Action, stages: int) -> list[ScheduleResult]:
    """Return what an action needs, of ``stages`` stages in all."""
    stage, batch = action.stage, action.micro_batch
    if action.kind == "F":
        return [ScheduleResult("F", stage - 1, batch)] if stage else []
    if action.kind == "W":
        return [ScheduleResult("I", stage, batch)]
    own = ScheduleResult("F", stage, batch)
    return [own, ScheduleResult("I", stage + 1, batch)] if stage < stages - 1 else [own]


def results(action: Action) -> list[ScheduleResult]:
    """Return what an action gives; ``B`` what ``I`` and ``W`` give."""
    kinds = "IW" if action.kind == "B" else action.kind
    return [ScheduleResult(kind, action.stage, action.micro_batch) for kind in kinds]


def _publish_results(spans: Sequence[Span], sent: dict[ScheduleResult, float]) -> None:
    """Give away what the last action gives, and what waited for it."""
    first = len(spans) - 1
    while first and spans[first - 1].action.paired:
        first -= 1
    for span in spans[first:]:
        sent.update(dict.fromkeys(results(span.action), spans[-1].end))


def _check_unique(orders: Sequence[Sequence[Action]]) -> None:
    done: set[ScheduleResult] = set()
    owner: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if action.rank != rank or owner.setdefault(action.stage, rank) != rank:
                raise UsageError(
                    f"{_action_text(action)} is in the list of rank {rank}, but stage {action.stage} belongs to rank "
                    f"{owner.get(action.stage, action.rank)}. Give each action in the list of its stage's rank."
                )
            if not done.isdisjoint(results(action)):
                raise UsageError(f"{_action_text(action)} is done twice. Give each action once.")
            done.update(results(action))


def _check_finished(
    orders: Sequence[Sequence[Action]],
    ranks: Sequence[Sequence[Span]],
    stages: int,
    here: dict[ScheduleResult, float],
) -> None:
    for order, spans in zip(orders, ranks, strict=True):
        if len(spans) < len(order):
            action = order[len(spans)]
            missing = [need for need in needs(action, stages) if need not in here]
            what = (
                f"{KINDS[missing[0].kind]} on stage {missing[0].stage}"
                if missing
                else "a result that is not sent"
            )
            raise UsageError(
                f"{_action_text(action)} waits for {what}, which does not run before it. Give the actions of all "
                "ranks, in the order in which they ran."
            )


def _action_text(action: Action) -> str:
    name = KINDS[action.kind].capitalize()
    return f"{name} of micro-batch {action.micro_batch} on stage {action.stage} (rank {action.rank})"
