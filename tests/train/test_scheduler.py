"""Schedulers that follow real optimizer steps."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from lockstep import Accelerator, GradientAccumulationPlugin
from train import problems

STEPS = 6


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_scheduler_that_was_not_prepared_is_named_once(is_prepared: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, own = problems.make_model(), None
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = half_each_step(own)
    model, optimizer = accelerator.prepare(model, own)
    if is_prepared:
        scheduler = accelerator.prepare(scheduler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(STEPS):
            with accelerator.accumulate(model):
                rows, labels = problems.make_rows(0, i, 4)
                accelerator.backward(F.cross_entropy(model(rows), labels))
                optimizer.step()
                scheduler.step()
    said = [one for one in caught if "was not prepared" in str(one.message)]
    assert [one.filename for one in said] == [__file__] * (not is_prepared)


def half_each_step(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def rates(
    order: str = "before",
    accumulation: int = 1,
    split_batches: bool = False,
    linked: bool = True,
) -> list[float]:
    """The learning rate after each of ``STEPS`` micro-batches; ``order``: where the scheduler is built."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        split_batches=split_batches,
        step_scheduler_with_optimizer=linked,
    )
    plain = problems.make_model()
    own = torch.optim.SGD(plain.parameters(), lr=1.0)
    if order == "before":
        model, optimizer, scheduler = accelerator.prepare(plain, own, half_each_step(own))
    elif order == "scheduler first":
        scheduler, optimizer, model = accelerator.prepare(half_each_step(own), own, plain)
    elif order == "scheduler prepared alone, first":
        scheduler = accelerator.prepare(half_each_step(own))
        model, optimizer = accelerator.prepare(plain, own)
    else:
        model, optimizer = accelerator.prepare(plain, own)
        built_on = optimizer if order == "after, on the prepared" else own
        scheduler = accelerator.prepare(half_each_step(built_on))
    found = []
    for i in range(STEPS):
        with accelerator.accumulate(model):
            rows, labels = problems.make_rows(0, i, 4)
            accelerator.backward(F.cross_entropy(model(rows), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append(own.param_groups[0]["lr"])
    assert scheduler.get_last_lr() == [found[-1]]
    return found


ORDERS = (
    "before",
    "scheduler first",
    "scheduler prepared alone, first",
    "after, on the prepared",
    "after, on the user's",
)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("order", ORDERS)
def test_a_schedule_follows_its_optimizer_wherever_it_was_built(order: str) -> None:
    assert rates(order) == [0.5**i for i in range(1, STEPS + 1)]
    assert rates(order, accumulation=3) == [1, 1, 0.5, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("world_size", [4])
def test_each_step_advances_once_for_every_process(run_distributed, world_size: int) -> None:
    expected = [0.5 ** (i * world_size) for i in range(1, STEPS + 1)]
    assert run_distributed(rates, world_size) == [expected] * world_size


@pytest.mark.parametrize("options", [{"split_batches": True}, {"linked": False}], ids=str)
def test_global_batches_and_unlinked_schedules_advance_once(
    run_distributed, options: dict[str, bool]
) -> None:
    assert run_distributed(rates, 2, **options) == [[0.5**i for i in range(1, STEPS + 1)]] * 2


@pytest.mark.filterwarnings("ignore:Detected call of")  # the first window's steps come before the optimizer's
def test_an_unlinked_schedule_also_advances_inside_windows() -> None:
    assert rates(accumulation=3, linked=False) == [0.5**i for i in range(1, STEPS + 1)]


def messages(length: int) -> list[str]:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(problems.make_model().parameters(), lr=1.0)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lockstep.preparation")
    logger.addHandler(handler)
    try:
        accelerator.prepare(optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=length))
    finally:
        logger.removeHandler(handler)
    return records


def test_the_resulting_number_of_steps_is_said_once(run_distributed) -> None:
    first, other = run_distributed(messages, 2, 101)
    assert len(first) == 1
    assert (
        "CosineAnnealingLR advances 2 times at each optimizer step and ends after 51 optimizer steps"
        in first[0]
    )
    assert "step_scheduler_with_optimizer=False" in first[0]
    assert other == []
    assert run_distributed(messages, 1, 101) == [[]]


def one_cycle(total: int, calls: int) -> list[float]:
    accelerator = Accelerator(cpu=True)
    plain = problems.make_model()
    own = torch.optim.SGD(plain.parameters(), lr=1.0)
    schedule = lr_scheduler.OneCycleLR(own, max_lr=1.0, total_steps=total)
    _, optimizer, scheduler = accelerator.prepare(plain, own, schedule)
    found = []
    for _ in range(calls):
        optimizer.step()
        scheduler.step()
        found.append(own.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_cycle_ends_at_its_lowest_rate_and_stays_there(run_distributed, world_size: int) -> None:
    own = torch.optim.SGD(problems.make_model().parameters(), lr=1.0)
    scheduler = lr_scheduler.OneCycleLR(own, max_lr=1.0, total_steps=10)
    plain = []
    for _ in range(9):
        own.step()
        scheduler.step()
        plain.append(own.param_groups[0]["lr"])
    expected = [plain[min(world_size * call, 9) - 1] for call in range(1, 13)]
    assert run_distributed(one_cycle, world_size, 10, 12) == [pytest.approx(expected)] * world_size


def test_the_count_of_a_schedule_is_adjusted_inside_windows_unless_told_otherwise() -> None:
    for adjust, expected in ((True, 4), (False, 2)):
        plugin = GradientAccumulationPlugin(num_steps=3, adjust_scheduler=adjust)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        plain = problems.make_model()
        own = torch.optim.SGD(plain.parameters(), lr=1.0)
        model, optimizer, scheduler = accelerator.prepare(plain, own, half_each_step(own))
        for _ in range(3):
            with accelerator.accumulate(model):
                optimizer.step()
                scheduler.step()
        assert scheduler._step_count == expected


def test_a_plateau_scheduler_gets_its_metric() -> None:
    accelerator = Accelerator(cpu=True)
    own = torch.optim.SGD(problems.make_model().parameters(), lr=1.0)
    optimizer, scheduler = accelerator.prepare(
        own, lr_scheduler.ReduceLROnPlateau(own, patience=1, factor=0.1)
    )
    for _ in range(4):
        optimizer.step()
        scheduler.step(1.0)
    assert own.param_groups[0]["lr"] == pytest.approx(0.1)
