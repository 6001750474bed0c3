"""The parts of a step sum to the time that passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep import Accelerator
from lockstep.runtime import Parts
from tests.observe.measures.loops import train_on


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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


def test_a_loop_without_a_prepared_loader_has_steps() -> None:
    accelerator = Accelerator()
    train_on(accelerator, torch.nn.Linear(4, 1), 5 * [torch.randn(2, 4)])
    steps = list(accelerator.measures.recent)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    assert all(step.samples is None for step in steps)
