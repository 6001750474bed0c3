"""The schedules of a pipeline: what each allows, and the bubble that its paper promises.

p ranks, m micro-batches, v stages on a rank; F, I and W are a stage's times for a micro-batch, B = I + W. A bubble is
idle time / (idle + useful time); useful is v m (F + B) on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.config.enums import Schedule
from lockstep.config.values import suggestion
from lockstep.errors import ConfigError
from lockstep.plan.schedule import Times

MOST_RANKS = 64
MOST_ACTIONS = 10_000


@dataclass(frozen=True)
class Rule:
    """A schedule: its title, torch's name for it, stages on a rank, and idle time on a rank by the formula.

    ``stages``: (by default, at least, at most). ``idle`` is None where the formula does not hold.
    """

    title: str
    torch_name: str
    stages: tuple[int, int, int]
    formula: str
    source: str
    idle: Callable[[int, int, Times], float | None]


def _one_direction(ranks: int, micro_batches: int, times: Times) -> float:
    return (ranks - 1) * (times.forward + times.duration("B"))


def _interleaved(ranks: int, micro_batches: int, times: Times) -> float | None:
    return _one_direction(ranks, micro_batches, times) if micro_batches >= ranks else None


def _zero_bubble(ranks: int, micro_batches: int, times: Times) -> float | None:
    idle = (ranks - 1) * (times.forward + times.input - times.weight)
    # W longer than F + I would make it negative: W fills more than the bubble, and the formula ends there.
    return idle if micro_batches >= ranks and idle >= 0 else None


def _zbv(ranks: int, micro_batches: int, times: Times) -> float | None:
    equal = times.forward == times.input == times.weight
    return (ranks - 1) * times.forward if equal and micro_batches >= 2 * ranks - 1 else None


def _dualpipev(ranks: int, micro_batches: int, times: Times) -> float | None:
    pair = times.forward + times.duration("B")
    idle = (ranks - 1) * (pair + times.duration("B") - 3 * times.weight)
    return idle if idle >= 0 else None


RULES = {
    Schedule.GPIPE: Rule(
        "GPipe", "GPipe", (1, 1, 1), "(p-1) (F+B)", "Huang et al., NeurIPS 2019", _one_direction
    ),
    Schedule.ONE_F_ONE_B: Rule(
        "1F1B", "1F1B", (1, 1, 1), "(p-1) (F+B)", "Narayanan et al., SC 2021", _one_direction
    ),
    Schedule.INTERLEAVED: Rule(
        "Interleaved 1F1B",
        "Interleaved1F1B",
        (2, 1, MOST_ACTIONS),
        "(p-1) (F+B), if m>=p",
        "Narayanan et al., SC 2021",
        _interleaved,
    ),
    Schedule.ZERO_BUBBLE: Rule(
        "Zero bubble",
        "InterleavedZeroBubble",
        (1, 1, MOST_ACTIONS),
        "(p-1) (F+I-W), if m>=p",
        "Qi et al., ICLR 2024: ZB-H1",
        _zero_bubble,
    ),
    Schedule.ZBV: Rule(
        "ZBV",
        "ZBVZeroBubble",
        (2, 2, 2),
        "(p-1) F, if F=I=W and m>=2p-1",
        "Qi et al., ICLR 2024: no rank waits between its first action and its last",
        _zbv,
    ),
    Schedule.DUALPIPEV: Rule(
        "DualPipeV",
        "DualPipeV",
        (2, 2, 2),
        "(p-1) (F&B+B-3W), F&B=F+B",
        "DeepSeek-AI, DualPipe, 2025",
        _dualpipev,
    ),
}


def checked(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 0) -> tuple[Schedule, int]:
    """Return the schedule called ``name`` and its stages per rank; 0: as many as it has by default.

    Raises:
        ConfigError: there is no such schedule, or it does not work with these numbers.
    """
    if name not in Schedule.list():
        hint = suggestion(name, Schedule.list()) or f" Use one of {', '.join(Schedule.list())}."
        raise ConfigError(f"There is no schedule {name[:40]!r}.{hint}")
    schedule = Schedule(name)
    default, least, most = RULES[schedule].stages
    stages = stages_per_rank or default
    if not least <= stages <= most:
        wants = f"exactly {least}" if least == most else f"at least {least}"
        hint = "" if least < most or least > 1 else ", or use interleaved"
        raise ConfigError(
            f"{name} has {wants} stage(s) on a rank, not {stages}. Set stages per rank to {least}{hint}."
        )
    if ranks > MOST_RANKS or ranks * stages * micro_batches > MOST_ACTIONS:
        raise ConfigError(
            f"{ranks} ranks x {stages} stages x {micro_batches} micro-batches are too many for a picture. Use at "
            f"most {MOST_RANKS} ranks, and {MOST_ACTIONS:,} for the product."
        )
    _check_micro_batches(schedule, ranks, micro_batches)
    return schedule, stages


def _check_micro_batches(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    needed = {Schedule.ONE_F_ONE_B: ranks, Schedule.DUALPIPEV: 2 * ranks}.get(schedule, 1)
    if micro_batches < needed:
        raise ConfigError(
            f"{schedule} needs at least as many micro-batches as stages, but there are {micro_batches} micro-batches "
            f"and {needed} stages. Use {needed} micro-batches or more, or fewer ranks."
        )
    if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE):
        # As torch does it: max(1, m // p) rounds, of m / rounds micro-batches each.
        rounds = max(1, micro_batches // ranks)
        if micro_batches % rounds:
            below, above = micro_batches // ranks * ranks, -(-micro_batches // ranks) * ranks
            raise ConfigError(
                f"{schedule} divides the micro-batches equally into {micro_batches} // {ranks} = {rounds} "
                f"rounds, but {micro_batches} / {rounds} is not whole. Use {below} or {above} micro-batches."
            )


def formula_bubble(
    schedule: Schedule, ranks: int, micro_batches: int, stages_per_rank: int, times: Times
) -> float | None:
    """Idle / (idle + useful) by the formula of the schedule's paper; None where it does not hold."""
    idle = RULES[schedule].idle(ranks, micro_batches, times)
    useful = stages_per_rank * micro_batches * (times.forward + times.duration("B"))
    return None if idle is None else idle / (idle + useful)
