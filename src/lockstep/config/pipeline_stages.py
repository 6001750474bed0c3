"""How many stages of a pipeline each rank holds."""

from __future__ import annotations

from lockstep.config.enums import Schedule
from lockstep.errors import ConfigError

V_SHAPED = (Schedule.ZBV, Schedule.DUALPIPEV)
LOOPED = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)


def stages_per_rank(schedule: Schedule, asked: int) -> int:
    """Stages that each rank holds under ``schedule``; ``asked``: 0 lets it choose.

    Raises:
        ConfigError: the schedule does not work with that many.
    """
    if schedule in V_SHAPED:
        if asked not in (0, 2):
            raise ConfigError(
                f"schedule={schedule} folds the stages into a V, two on each rank, but stages_per_rank={asked}. "
                "Leave stages_per_rank out."
            )
        return 2
    if schedule in LOOPED:
        if asked == 1 and schedule is Schedule.INTERLEAVED:
            raise ConfigError(
                "schedule=interleaved needs several stages on each rank, but stages_per_rank=1. "
                "Take stages_per_rank=2 or schedule=1f1b."
            )
        return asked or (2 if schedule is Schedule.INTERLEAVED else 1)
    if asked > 1:
        raise ConfigError(
            f"schedule={schedule} has one stage on each rank, but stages_per_rank={asked}. "
            "Take schedule=interleaved for several."
        )
    return 1
