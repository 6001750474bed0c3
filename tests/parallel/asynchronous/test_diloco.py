"""DiLoCo against its formulas written out by hand, against local SGD, and against itself after a resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Accelerator, CheckpointError, DiLoCo, LocalSGD
from parallel.asynchronous import problem
from parallel.asynchronous.problem import Tensors, Worker

PLAIN = partial(torch.optim.SGD, lr=1.0)


def train(block: Any, steps: int = 7) -> Tensors:
    accelerator, model, optimizer = problem.prepared(problem.make_model())
    with block(accelerator, model) as rounds:
        for number in range(steps):
            problem.learn(accelerator, model, optimizer, rounds, number)
        if steps % 3 == 0:  # it ended with a meeting
            assert rounds.ranks_agree
    return problem.tensors(model)


def simulate(world_size: int, steps: int, every: int) -> Tensors:
    """Nesterov with lr 0.7 and momentum 0.9: v = 0.9 v + d, then start -= 0.7 (d + 0.9 v)."""
    workers = [Worker(rank) for rank in range(world_size)]
    names = [name for name, _ in workers[0].model.named_parameters()]
    start = {name: p.detach().clone() for name, p in workers[0].model.named_parameters()}
    velocity = {name: torch.zeros_like(value) for name, value in start.items()}
    for step in range(1, steps + 1):
        for worker in workers:
            worker.step([step - 1])
        if step % every and step < steps:
            continue
        means = problem.mean_of(workers)
        for name in names:
            outer = start[name] - means[name]
            velocity[name] = 0.9 * velocity[name] + outer
            start[name] = start[name] - 0.7 * (outer + 0.9 * velocity[name])
        problem.put(workers, {**means, **start})
    return problem.tensors(workers[0].model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_outer_steps_follow_the_paper(run_distributed, world_size: int) -> None:
    expected = simulate(world_size, 7, 3)
    for offload in (False, True):
        ends = run_distributed(train, world_size, partial(DiLoCo, steps=3, offload=offload))
        assert problem.are_equal(ends)
        assert problem.distance(ends[0], expected) < 2e-6


def test_with_plain_sgd_of_learning_rate_1_it_is_local_sgd(run_distributed) -> None:
    ends = run_distributed(train, 2, partial(DiLoCo, steps=3, outer_optimizer=PLAIN))
    local = run_distributed(train, 2, partial(LocalSGD, local_sgd_steps=3))
    # start - (start - mean) is the mean up to the last bit.
    assert problem.distance(ends[0], local[0]) < 3e-7
    assert problem.are_equal(ends)


def run_with_stop(folder: Path, block: Any, resumed: bool, stop: int, steps: int) -> Tensors:
    """Save after ``stop`` steps and go on; or start with other weights, load, and make the steps after it."""
    accelerator = Accelerator(cpu=True)
    model = problem.make_model()
    if resumed:
        with torch.no_grad():
            model[0].weight.add_(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    rounds = block(accelerator, model, optimizer=optimizer)
    accelerator.register_for_checkpointing(rounds)
    if resumed:
        accelerator.load_state(folder)
        assert rounds.num_steps == stop
    with rounds:
        for number in range(stop if resumed else 0, steps):
            problem.learn(accelerator, model, optimizer, rounds, number)
            if number + 1 == stop and not resumed:
                accelerator.save_state(folder)
    return problem.tensors(model)


@pytest.mark.parametrize(
    "block", [partial(DiLoCo, steps=4), partial(LocalSGD, local_sgd_steps=4)], ids=["diloco", "local"]
)
def test_a_run_goes_on_bit_for_bit_inside_of_a_round(run_distributed, tmp_path: Path, block: Any) -> None:
    for stop in (6, 8):
        folder = tmp_path / str(stop)
        whole = run_distributed(run_with_stop, 2, folder, block, False, stop, 11)
        resumed = run_distributed(run_with_stop, 2, folder, block, True, stop, 11)
        assert problem.are_equal(whole + resumed)
    (message,) = run_distributed(load_in_another_world, 1, tmp_path / "6", block)
    assert "2 steps into a round by 2 ranks" in message


def load_in_another_world(folder: Path, block: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        run_with_stop(folder, block, True, 6, 11)
    return str(caught.value)


def wrong_states() -> list[str]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(problem.make_model())
    diloco = DiLoCo(accelerator, model, 4)
    before = problem.tensors(model)
    state = diloco.state_dict()
    wrong = [
        {},
        {key: value for key, value in state.items() if key != "outer"},
        {**state, "start": {**state["start"], "0.weight": torch.zeros(3)}},
        {**state, "in_round": 1, "parameters": {"other": torch.zeros(3)}},
    ]
    messages = []
    for one in wrong:
        with pytest.raises(CheckpointError) as caught:
            diloco.load_state_dict(one)
        messages.append(str(caught.value))
    assert problem.distance(problem.tensors(model), before) == 0
    return messages


def test_states_that_do_not_fit_are_refused_and_change_nothing(run_distributed) -> None:
    ((lacks, outer, shape, stranger),) = run_distributed(wrong_states, 1)
    assert "lacks buffers, in_round, num_steps" in lacks
    assert "lacks start or outer" in outer
    assert "(3,) for '0.weight', but the model has (8, 6)" in shape
    assert "'other'" in stranger
