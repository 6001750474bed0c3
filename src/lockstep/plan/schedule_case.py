"""One schedule with its numbers, counted and by formula, and the rows of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.enums import Schedule
from lockstep.config.values import repr_short
from lockstep.errors import ConfigError
from lockstep.plan.schedule import Timeline, Times, simulate
from lockstep.plan.schedule_table import RULES, checked, formula_bubble


@dataclass(frozen=True)
class ScheduleCase:
    """A schedule on so many ranks: its timeline, or the reason why there is none."""

    schedule: Schedule
    ranks: int
    micro_batches: int
    stages_per_rank: int
    times: Times
    timeline: Timeline | None
    reason: str = ""

    @property
    def sizes(self) -> str:
        return f"{_count(self.ranks, 'rank')}, {_count(self.micro_batches, 'micro-batch', 'es')}"

    @property
    def title(self) -> str:
        stages = f", {self.stages_per_rank} stages on each" if self.stages_per_rank > 1 else ""
        bubble = f", bubble {self.timeline.bubble:.1%}" if self.timeline else ""
        return f"{RULES[self.schedule].title}: {_count(self.ranks, 'rank')}{stages}, " + (
            f"{_count(self.micro_batches, 'micro-batch', 'es')}{bubble}"
        )

    @property
    def formula(self) -> float | None:
        """The bubble by the formula of the schedule's paper; None where it does not hold."""
        return formula_bubble(self.schedule, self.ranks, self.micro_batches, self.stages_per_rank, self.times)

    def cells(self) -> tuple[str, ...]:
        """schedule, stages, bubble, formula, its idle time, waiting, step, in flight."""
        timeline, stages = self.timeline, self.stages_per_rank
        if timeline is None:
            return (str(self.schedule), *["-"] * 6, self.reason)
        formula = self.formula
        return (
            str(self.schedule),
            str(stages),
            f"{timeline.bubble:.2%}",
            "-" if formula is None else f"{formula:.2%}",
            RULES[self.schedule].formula,
            f"{timeline.inner_bubble:.2%}",
            f"{timeline.makespan / stages:g}",
            " ".join(f"{count / stages:g}" for count in self._in_flight(timeline)),
        )

    def facts(self) -> dict[str, object]:
        """The same as numbers, in a stage's units."""
        facts: dict[str, object] = {
            "schedule": str(self.schedule),
            "ranks": self.ranks,
            "micro_batches": self.micro_batches,
        }
        if self.timeline is None:
            return facts | {"reason": self.reason}
        return facts | {
            "stages_per_rank": self.stages_per_rank,
            "bubble": self.timeline.bubble,
            "formula": self.formula,
            "source": RULES[self.schedule].source,
            "waiting": self.timeline.inner_bubble,
            "makespan": self.timeline.makespan,
            "idle": [self.timeline.idle(rank) for rank in range(self.ranks)],
            "in_flight": self._in_flight(self.timeline),
        }

    def _in_flight(self, timeline: Timeline) -> list[int]:
        return [timeline.in_flight(rank) for rank in range(self.ranks)]


def counted(name: str, ranks: int, micro_batches: int, stages_per_rank: int, times: Times) -> ScheduleCase:
    """The schedule ``name``, as torch runs it.

    Raises:
        ConfigError: there is no such schedule, or it does not work with these numbers.
    """
    from lockstep.plan.schedule_torch import action_lists

    schedule, stages = checked(name, ranks, micro_batches, stages_per_rank)
    timeline = simulate(action_lists(name, ranks, micro_batches, stages), times)
    return ScheduleCase(schedule, ranks, micro_batches, stages, times, timeline)


def compared(ranks: int, micro_batches: int, times: Times) -> list[ScheduleCase]:
    """All schedules; one that does not work with these numbers has the reason.

    Raises:
        ConfigError: none of them works.
    """
    cases = []
    for schedule in Schedule:
        try:
            cases.append(counted(schedule.value, ranks, micro_batches, 0, times))
        except ConfigError as error:
            cases.append(ScheduleCase(schedule, ranks, micro_batches, 0, times, None, str(error)))
    if not any(case.timeline for case in cases):
        raise ConfigError(cases[0].reason)
    return cases


def parse_times(text: str) -> Times:
    """``F,B`` or ``F,I,W``: positive numbers; of B, I is half.

    Raises:
        ConfigError: the text is something else.
    """
    try:
        numbers = [float(part) for part in text[:200].split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(1e-3 <= number <= 1e3 for number in numbers):  # nor nan
        raise ConfigError(
            f"--times={repr_short(text)} is not two or three numbers from 0.001 to 1000. Give forward,backward such as "
            "1,2 or forward,input,weights such as 1,1,1."
        )
    if len(numbers) == 2:
        return Times(numbers[0], numbers[1] / 2, numbers[1] / 2)
    return Times(*numbers)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
