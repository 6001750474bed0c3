"""Seeds and states of random number generators; the oracle is the sequence of numbers itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep import set_seed, synchronize_rng_states
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime import end_runtime, rng_state, set_rng_state, start_runtime
from tests.refusals import expect_refusal


@pytest.fixture(autouse=True)
def _keep_states() -> Iterator[None]:
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torch_state)


def draw() -> list[float]:
    return [random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.randn(()).item()]


def test_a_seed_means_what_it_means_to_each_library() -> None:
    set_seed(3)
    assert random.random() == random.Random(3).random()
    assert np.random.rand() == np.random.RandomState(3).rand()
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("seed", [0, -1, 2**40])
def test_any_integer_is_a_seed(seed: int) -> None:
    set_seed(seed)
    draw()


def test_deterministic_switches_torch() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("drawn_before", [0, 1])
def test_states_survive_json_and_safetensors_exactly(drawn_before: int, tmp_path: Path) -> None:
    set_seed(5)
    for _ in range(drawn_before):
        draw()
    state = rng_state()
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    values = {key: value for key, value in state.items() if key not in tensors}
    save_file(tensors, tmp_path / "state.safetensors")
    (tmp_path / "state.json").write_text(json.dumps(values, allow_nan=False))
    expected = [draw() for _ in range(700)]
    set_seed(99)
    set_rng_state(
        {**load_file(tmp_path / "state.safetensors"), **json.loads((tmp_path / "state.json").read_text())}
    )
    assert [draw() for _ in range(700)] == expected


def test_an_incomplete_state_is_refused_and_changes_nothing() -> None:
    state = rng_state()
    del state["torch"]
    set_seed(5)
    expected = draw()
    set_seed(5)
    expect_refusal(UsageError, "'torch'", set_rng_state, state)
    assert draw() == expected


def test_names_of_generators_are_checked() -> None:
    expect_refusal(ConfigError, "'torch'", synchronize_rng_states, ["troch"])
    expect_refusal(ConfigError, "xla", synchronize_rng_states, ["xla"])
    expect_refusal(UsageError, "generator", synchronize_rng_states, ["generator"])


def test_one_process_keeps_its_own_state() -> None:
    set_seed(5)
    expected = torch.rand(3)
    set_seed(5)
    synchronize_rng_states(["torch"])
    assert torch.equal(torch.rand(3), expected)


def draw_on_ranks() -> tuple[list[float], list[float]]:
    start_runtime(cpu=True)
    try:
        set_seed(10, device_specific=True)
        generator = torch.Generator().manual_seed(start_runtime().rank)
        apart = [torch.rand(()).item(), torch.rand((), generator=generator).item()]
        synchronize_rng_states(["torch", "generator"], generator)
        together = [torch.rand(()).item(), torch.rand((), generator=generator).item()]
        return apart, together
    finally:
        end_runtime()


def test_ranks_differ_until_they_are_synchronised(run_distributed: Callable[..., Any]) -> None:
    (apart_0, together_0), (apart_1, together_1) = run_distributed(draw_on_ranks, 2)
    assert not set(apart_0) & set(apart_1)
    assert together_0 == together_1
    oracle = torch.Generator().manual_seed(10)
    assert [torch.rand((), generator=oracle).item() for _ in range(2)] == [apart_0[0], together_0[0]]
    assert apart_1[0] == torch.rand((), generator=torch.Generator().manual_seed(11)).item()
