"""The order in which torch's pipeline schedules work, without processes: lists of actions, as plain values.

The only module here that imports torch, and only when it is called. It uses what torch does not document: which
methods of a stage a schedule calls, and ``pipeline_order``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.errors import UsageError
from lockstep.plan.schedule import Action
from lockstep.plan.schedule_table import RULES, checked


def action_lists(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 0) -> list[list[Action]]:
    """What torch's schedule does, rank by rank. Communication is left out.

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

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: []  # preparations, and operations to send and to receive: none


def _no_loss(*_: object) -> None:
    """In place of a loss, without which a schedule would leave out backward."""


def _executed(torch_name: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Schedules with one stage on a rank run their loop. (What 1F1B of torch 2.13 says in ``pipeline_order`` is not
    what it does: on the last rank forwards are numbered from 1.)"""
    import torch
    from torch.distributed.pipelining.schedules import get_schedule_class

    stage = _RecordingStage(rank, rank, ranks, ranks)
    schedule = get_schedule_class(torch_name)(stage, micro_batches, loss_fn=_no_loss)
    with torch.enable_grad():
        schedule.step(target=torch.zeros(micro_batches), return_outputs=False)
    return stage.actions


def _planned(torch_name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> list[list[Action]]:
    """Schedules with several run what they wrote down for all ranks."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    count = ranks * stages_per_rank
    own = [_RecordingStage(stage, 0, count, ranks) for stage in range(0, count, ranks)]
    schedule = get_schedule_class(torch_name)(own, micro_batches, loss_fn=_no_loss)
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    for rank, order in schedule.pipeline_order.items():
        for planned in order:
            if planned is None:  # a pause, for torch's own pictures
                continue
            parts = planned.sub_actions or (planned,)
            for part in parts:
                kind = str(part.computation_type.value)
                paired = part is not parts[-1]
                orders[rank].append(Action(rank, part.stage_index, kind, part.microbatch_index, paired))
    return orders
