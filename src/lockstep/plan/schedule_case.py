"""One schedule with its numbers, counted in torch's order of work, and the rows of a comparison.

Torch is imported when it is asked for that order. Read is what torch does not document: which methods of a stage a
schedule calls, and ``pipeline_order``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.config.enums import Schedule
from lockstep.config.values import decimal_number, repr_short
from lockstep.errors import ConfigError, UsageError
from lockstep.plan.schedule import Action, Timeline, Times, simulate
from lockstep.plan.schedule_table import RULES, checked


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
        return f"{_counted(self.ranks, 'rank')}, {_counted(self.micro_batches, 'micro-batch', 'es')}"

    @property
    def title(self) -> str:
        stages = f", {self.stages_per_rank} stages on each" if self.stages_per_rank > 1 else ""
        bubble = f", bubble {self.timeline.bubble:.1%}" if self.timeline else ""
        return f"{RULES[self.schedule].title}: {_counted(self.ranks, 'rank')}{stages}, " + (
            f"{_counted(self.micro_batches, 'micro-batch', 'es')}{bubble}"
        )

    def cells(self) -> tuple[str, ...]:
        """schedule, stages, bubble, waiting, step, in flight."""
        timeline, stages = self.timeline, self.stages_per_rank
        if timeline is None:
            return (str(self.schedule), *["-"] * 4, self.reason)
        return (
            str(self.schedule),
            str(stages),
            f"{timeline.bubble:.2%}",
            f"{timeline.inner_bubble:.2%}",
            f"{timeline.makespan / stages:g}",
            " ".join(f"{count / stages:g}" for count in self._in_flight(timeline)),
        )

    def facts(self) -> dict[str, object]:
        """Return the same as numbers, in a stage's units."""
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
            "waiting": self.timeline.inner_bubble,
            "makespan": self.timeline.makespan,
            "idle": [self.timeline.idle(rank) for rank in range(self.ranks)],
            "in_flight": self._in_flight(self.timeline),
        }

    def _in_flight(self, timeline: Timeline) -> list[int]:
        return [timeline.in_flight(rank) for rank in range(self.ranks)]


def counted(name: str, ranks: int, micro_batches: int, stages_per_rank: int, times: Times) -> ScheduleCase:
    """Count the schedule ``name``, as torch runs it.

    Raises:
        ConfigError: there is no such schedule, or it does not work with these numbers.
    """
    schedule, stages = checked(name, ranks, micro_batches, stages_per_rank)
    timeline = simulate(action_lists(name, ranks, micro_batches, stages), times)
    return ScheduleCase(schedule, ranks, micro_batches, stages, times, timeline)


def compared(ranks: int, micro_batches: int, times: Times) -> list[ScheduleCase]:
    """Compare all schedules; one that does not work with these numbers has the reason.

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
    """Parse ``F,B`` or ``F,I,W``: positive numbers; of B, I is half.

    Raises:
        ConfigError: the text is something else.
    """
    numbers = [decimal_number(part) for part in text[:200].split(",")]
    # NaN is in no range, and refused, too.
    if len(numbers) not in (2, 3) or not all(1e-3 <= number <= 1e3 for number in numbers):
        raise ConfigError(
            f"--times={repr_short(text)} is not two or three numbers from 0.001 to 1000. Give forward,backward such as "
            "1,2 or forward,input,weights such as 1,1,1."
        )
    if len(numbers) == 2:
        return Times(numbers[0], numbers[1] / 2, numbers[1] / 2)
    return Times(*numbers)


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def action_lists(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 0) -> list[list[Action]]:
    """Return what torch's schedule does, rank by rank. Communication is left out.

    Raises:
        ConfigError: there is no such schedule, or it does not work with these numbers.
        UsageError: this version of torch does not let its schedules be read this way.
    """
    schedule, stages = checked(name, ranks, micro_batches, stages_per_rank)
    torch_name = RULES[schedule].torch_name
    try:
        if stages == 1 and schedule in ("gpipe", "1f1b"):
            orders = [_executed(torch_name, rank, ranks, micro_batches) for rank in range(ranks)]
        else:
            orders = _planned(torch_name, ranks, micro_batches, stages)
    except (AttributeError, TypeError, ImportError) as error:
        import torch

        from lockstep.torch_internals.versions import NEWEST, OLDEST

        raise UsageError(
            f"The schedules of torch {torch.__version__} cannot be read ({error}). Use torch {OLDEST} to {NEWEST}."
        ) from error
    return orders


class _RecordingStage:
    """Stands for a stage: notes what a schedule asks of it, and computes and sends nothing."""

    def __init__(self, stage: int, rank: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.submod, self.device = None, "cpu"
        self.actions: list[Action] = []

    def forward_one_chunk(self, micro_batch: int, *_: object, **__: object) -> None:
        self.actions.append(Action(self.group_rank, self.stage_index, "F", micro_batch))

    def backward_one_chunk(
        self, micro_batch: int, loss: object = None, full_backward: bool = True, **_: object
    ) -> None:
        kind = "B" if full_backward else "I"
        self.actions.append(Action(self.group_rank, self.stage_index, kind, micro_batch))

    def __getattr__(self, name: str) -> Callable[..., list[object]]:
        if name.startswith("__"):
            raise AttributeError(name)
        # Preparations, and operations to send and to receive: there are none.
        return lambda *_, **__: []


def _no_loss(*_: object) -> None:
    """Stand in for a loss, without which a schedule would leave out backward."""


def _executed(torch_name: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Schedules with one stage on a rank run their loop. (What 1F1B of torch 2.13 says in ``pipeline_order`` is not
    what it does: on the last rank forwards are numbered from 1.)"""
    import torch
    from torch.distributed.pipelining.schedules import get_schedule_class

    from lockstep.torch_internals.pipelining import without_setup

    stage = _RecordingStage(rank, rank, ranks, ranks)
    schedule = get_schedule_class(torch_name)(stage, micro_batches, loss_fn=_no_loss)
    without_setup(schedule)
    with torch.enable_grad():
        schedule.step(target=torch.zeros(micro_batches), return_outputs=False)
    return stage.actions


def _planned(torch_name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> list[list[Action]]:
    """Schedules with several run what they wrote down for all ranks."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    count = ranks * stages_per_rank
    # A schedule is made of one rank's stages, and plans for all ranks.
    own = [_RecordingStage(stage, 0, count, ranks) for stage in range(0, count, ranks)]
    schedule = get_schedule_class(torch_name)(own, micro_batches, loss_fn=_no_loss)
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    for rank, order in schedule.pipeline_order.items():
        for planned in order:
            # None is a pause, for torch's own pictures.
            if planned is None:
                continue
            parts = planned.sub_actions or (planned,)
            for part in parts:
                kind = str(part.computation_type.value)
                # Of overlapped actions all but the last wait until that one is done.
                paired = part is not parts[-1]
                orders[rank].append(Action(rank, part.stage_index, kind, part.microbatch_index, paired))
    return orders
