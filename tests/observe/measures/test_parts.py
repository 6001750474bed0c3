"""The parts of a step sum to the time that passed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep import Accelerator
from lockstep.runtime import PARTS, Parts, difference


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_moment_is_in_one_part() -> None:
    rng = random.Random(0)
    clock = FakeTime()
    parts = Parts(clock)
    expected = dict.fromkeys(PARTS, 0.0)
    current = "other"
    for _ in range(1000):
        spent = rng.randrange(1000)
        clock.now += spent
        expected[current] += spent
        following = rng.choice(PARTS)
        assert parts.enter(following) == current
        current = following
    clock.now += 5
    assert parts.read_entered() == expected
    expected[current] += 5
    assert parts.read() == expected
    assert sum(parts.read().values()) == clock.now


def test_a_difference_has_only_what_took_time() -> None:
    clock = FakeTime()
    parts = Parts(clock)
    before = parts.read()
    parts.enter("data")
    clock.now += 2
    parts.enter("backward")
    clock.now += 3
    assert difference(parts.read(), before) == {"data": 2.0, "backward": 3.0}


def train(accelerator: Accelerator, steps: int, on_batch: Callable[[], object] = lambda: None) -> Any:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = torch.utils.data.DataLoader(torch.randn(4 * steps, 4), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        on_batch()
        accelerator.backward(model(batch).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_the_parts_of_real_steps_sum_to_what_the_clock_says() -> None:
    accelerator = Accelerator()
    train(accelerator, 12)
    steps = [step.seconds for step in accelerator.measures.recent]
    assert len(steps) == 11  # the last one has no boundary yet
    for seconds in steps:
        assert seconds is not None
        rest = {part: value for part, value in seconds.items() if part != "total"}
        assert {"data", "forward", "backward", "optimizer"} <= rest.keys() <= {*PARTS}
        assert abs(sum(rest.values()) - seconds["total"]) <= 1e-9


def test_time_goes_to_the_part_in_which_it_is_spent(monkeypatch: Any) -> None:
    clock = FakeTime()
    accelerator = Accelerator()
    kept = accelerator.gradient_state.clock.parts
    monkeypatch.setattr(accelerator.gradient_state.clock, "parts", kept)  # undone at the end
    monkeypatch.setattr(accelerator.gradient_state.clock, "enter", kept.enter)
    accelerator.gradient_state.clock.keep_parts(Parts(clock))
    monkeypatch.setattr("time.perf_counter", clock)
    durations = accelerator.gradient_state.clock.durations_s
    durations.clear()

    def passes(seconds: float) -> Callable[..., None]:
        def spend(*_: object) -> None:
            clock.now += seconds

        return spend

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            passes(8)()
            output = self.linear(x)
            if output.requires_grad:
                output.register_hook(passes(16))
            return output

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> torch.Tensor:
            passes(1)()
            return torch.randn(4)

    plain = Model()
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.01)
    optimizer.register_step_post_hook(passes(32))
    model, optimizer, loader = accelerator.prepare(
        plain, optimizer, torch.utils.data.DataLoader(Data(), batch_size=2)
    )
    for batch in loader:
        passes(64)()
        loss = model(batch).square().mean()
        passes(128)()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.wait_for_everyone()
        with torch.no_grad():
            model(batch)
        passes(256)()
    passes(512)()  # of no step
    accelerator.end_training()
    steps = list(accelerator.measures.recent)
    expected = {
        "data": 2.0,
        "forward": 8.0 + 128.0,
        "backward": 16.0,
        "optimizer": 32.0,
        "inference": 8.0,
        "other": 64.0 + 256.0,
        "total": 514.0,
    }
    assert [step.seconds for step in steps[:2]] == [expected, expected]
    assert steps[2].seconds == expected
    # The watch's own clock has the same, from boundary to boundary; the first step has none before it.
    assert list(durations)[-1:] == [514.0]


def test_evaluation_and_windows_do_not_end_a_step(tmp_path: Path) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model: Any = torch.nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for batch in loader:
            model(batch)
    assert accelerator.measures.step == 4
    accelerator.end_training()
    assert [step.step for step in accelerator.measures.recent] == [1, 2, 3, 4]
    assert [step.samples for step in accelerator.measures.recent] == [6, 6, 6, 6]


def test_a_loop_without_a_prepared_loader_has_steps() -> None:
    accelerator = Accelerator()
    model: Any = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(5):
        accelerator.backward(model(torch.randn(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    steps = list(accelerator.measures.recent)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    assert all(step.samples is None for step in steps)
