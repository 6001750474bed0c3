"""The schedules of a pipeline, and what each allows."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.config.enums import Schedule
from lockstep.config.values import suggestion
from lockstep.errors import ConfigError

MOST_RANKS = 64
MOST_ACTIONS = 10_000


class Rule(NamedTuple):
    """A schedule: its title, torch's name for it, and stages on a rank: by default, at least, at most."""

    title: str
    torch_name: str
    stages: tuple[int, int, int]


RULES = {
    Schedule.GPIPE: Rule("GPipe", "GPipe", (1, 1, 1)),
    Schedule.ONE_F_ONE_B: Rule("1F1B", "1F1B", (1, 1, 1)),
    Schedule.INTERLEAVED: Rule("Interleaved 1F1B", "Interleaved1F1B", (2, 1, MOST_ACTIONS)),
    Schedule.ZERO_BUBBLE: Rule("Zero bubble", "InterleavedZeroBubble", (1, 1, MOST_ACTIONS)),
    Schedule.ZBV: Rule("ZBV", "ZBVZeroBubble", (2, 2, 2)),
    Schedule.DUALPIPEV: Rule("DualPipeV", "DualPipeV", (2, 2, 2)),
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
