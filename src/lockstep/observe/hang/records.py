"""What one rank was doing when a run stood still, as values that travel as JSON; knows nothing of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from lockstep.errors import ControlError

Message: TypeAlias = Mapping[str, Any]
"""An object of JSON that came over the network: what is in it is checked where it is read."""

MOST_PENDING = 16
LONGEST_TEXT = 512
LONGEST_STACK = 8192


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code. ``file`` is relative to the worker's directory, or only the file's name.

    ``doing`` says more where the line alone misleads: "waiting for its data-loader workers (pids 12, 13)".
    """

    file: str
    line: int
    function: str
    doing: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class PendingCollective:
    """A collective, send or receive that this rank has issued and that is not complete.

    Attributes:
        operation: As torch.distributed calls it: "all_reduce".
        number: Which of its group's collectives it is, as torch counts them; None: not known.
        group: Name of the process group; "": not known.
        sizes: Shapes of its inputs, e.g. "[4, 8], [2]"; "": none, or not known.
        dtype: Of its inputs, e.g. "float32"; "": none, or not known.
        place: The user's line that issued it.
        peer: For a send or receive the other global rank; None: not known, or a collective.
    """

    operation: str
    number: int | None
    group: str
    sizes: str
    dtype: str
    place: SourceLine | None
    peer: int | None = None


@dataclass(frozen=True)
class Evidence:
    """What one rank was doing.

    Attributes:
        step: Steps that it has done.
        idle_s: Seconds since its last sign of progress.
        place: Innermost line of the user's code in the main thread.
        pending: Collectives that are not complete, oldest first.
        completed: Process group -> number of its last complete collective.
        stack: The main thread's Python stack, innermost call last; at most 8 KiB.
        waits: The main thread is inside torch or waits for a handle, so that what is pending holds it up.
        call: What the user's line called, if that is torch's ("all_reduce") or ours ("Accelerator.save_state").
        groups: Process group -> the global ranks in it, as far as this rank is in it.
        recent: The last collectives that are complete, oldest first.
        waited_s: How long its threads have waited for a processor so far.
    """

    rank: int
    host: str
    pid: int
    step: int
    idle_s: float
    place: SourceLine | None
    pending: tuple[PendingCollective, ...]
    completed: Mapping[str, int]
    stack: str
    waits: bool = True
    call: str = ""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    recent: tuple[PendingCollective, ...] = ()
    waited_s: float = 0.0

    def has_moved(self, since: Evidence) -> bool:
        """Return whether a collective was begun or has ended since an earlier evidence."""
        mine, before = (
            (one.completed, [(each.group, each.number, each.operation, each.peer) for each in one.pending])
            for one in (self, since)
        )
        # A call that nobody counts is told from the next by what it does.
        is_counted = all(one.number is not None for one in self.pending)
        return mine != before or (bool(self.pending) and not is_counted and self.stack != since.stack)

    def to_message(self) -> dict[str, object]:
        """Return the record as values of JSON."""
        return asdict(self)

    @staticmethod
    def from_message(message: Message) -> Evidence:
        """Return the evidence in a message that came over the network; texts are cut to their greatest lengths.

        Raises:
            ControlError: the message is not such evidence.
        """
        try:
            return _evidence(message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ControlError(
                f"A worker's report of what it does is malformed ({type(error).__name__}: {str(error)[:100]}). "
                "Run the same version of Lockstep on every machine."
            ) from None


def _evidence(message: Message) -> Evidence:
    return Evidence(
        rank=_integer(message["rank"]),
        host=_printable_text(message["host"]),
        pid=_integer(message["pid"]),
        step=_integer(message["step"]),
        idle_s=_seconds(message["idle_s"]),
        place=_source_line(message["place"]),
        pending=tuple(_collective(one) for one in _as_list(message["pending"])[:MOST_PENDING]),
        completed={
            _printable_text(group): _integer(number, -1) for group, number in _items(message["completed"])
        },
        stack=_printable_text(message["stack"], LONGEST_STACK),
        waits=message["waits"] is True,
        call=_printable_text(message["call"]),
        groups={
            _printable_text(group): tuple(_integer(rank) for rank in _as_list(ranks))
            for group, ranks in _items(message["groups"])
        },
        recent=tuple(_collective(one) for one in _as_list(message["recent"])[-MOST_PENDING:]),
        waited_s=_seconds(message["waited_s"]),
    )


def _source_line(value: Message | None) -> SourceLine | None:
    if value is None:
        return None
    return SourceLine(
        _printable_text(value["file"]),
        _integer(value["line"]),
        _printable_text(value["function"]),
        _printable_text(value["doing"]),
    )


def _collective(value: Message) -> PendingCollective:
    return PendingCollective(
        operation=_printable_text(value["operation"]),
        number=None if value["number"] is None else _integer(value["number"]),
        group=_printable_text(value["group"]),
        sizes=_printable_text(value["sizes"]),
        dtype=_printable_text(value["dtype"]),
        place=_source_line(value["place"]),
        peer=None if value["peer"] is None else _integer(value["peer"]),
    )


def _integer(value: object, least: int = 0) -> int:
    # By type and not by isinstance: True is an int.
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{str(value)[:40]!r} is not a whole number of at least {least}")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"{str(value)[:40]!r} is not a time in seconds")
    return float(value)


def _printable_text(value: object, longest: int = LONGEST_TEXT) -> str:
    """Printable text on one line, or, where it may be longer, on several."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    kept = "\n" if longest > LONGEST_TEXT else ""
    return "".join(one if one.isprintable() or one in kept else "?" for one in value[:longest])


def _as_list(value: object) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)) or len(value) > 65536:
        raise TypeError(f"{type(value).__name__} instead of a list")
    return value


def _items(value: object) -> list[tuple[object, object]]:
    if not isinstance(value, Mapping) or len(value) > 1024:
        raise TypeError(f"{type(value).__name__} instead of an object")
    return list(value.items())
