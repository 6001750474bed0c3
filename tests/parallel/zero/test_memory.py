"""Bytes under each stage of ZeRO, counted: at rest after a step, and at most within one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.plan import state_bytes, textbook_bytes
from lockstep.testing import WorkerPool
from lockstep.utils import Parallel
from parallel.blocks_and_root import BlocksAndRoot
from parallel.live_bytes import LiveBytes, reachable_bytes

WIDTH, BLOCKS = 32, 32
ROOT = WIDTH * WIDTH
BLOCK = 2 * WIDTH * WIDTH
PSI = BLOCKS * BLOCK + ROOT
GLOO_THREADS = 2
ROWS = 2
INPUTS = 4 * (2 * BLOCKS + 1) * ROWS * WIDTH
"""Bytes that autograd keeps from a forward: the input of each layer."""


BY_BLOCK = " blocks=blocks.*"
"""Small models are one group if their blocks are not named."""


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters()) if name == "adamw" else torch.optim.SGD(model.parameters())


def in_flight(plan: Parallel) -> int:
    """Bytes of blocks that are under way on the CPU: the one that is received, and those that gloo's threads,
    two for each process group, may hold a moment longer than the calls take."""
    groups = 2 if plan.replicate > 1 or plan.hpz else 1
    return 4 * BLOCK + GLOO_THREADS * groups * 4 * (BLOCK + BLOCK // 2)


def part(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def parts(model: nn.Module, optimizer: Any) -> dict[str, list[torch.Tensor]]:
    state = [value for values in optimizer.state.values() for value in values.values() if value.ndim]
    return {
        "weights": [part(p) for p in model.parameters()],
        "gradients": [part(p.grad) for p in model.parameters() if p.grad is not None],
        "optimizer": [part(value) for value in state],
    }


def settled(count: Callable[[], int], at_most: float, patience_s: float = 20.0) -> int:
    """The count, once gloo's threads have let go of what they sent."""
    deadline = time.monotonic() + patience_s
    while (found := count()) > at_most and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@dataclass
class AtRest:
    counted: dict[str, int]
    reported: tuple[int, int, int]
    reachable: int
    """Of all tensors there are beyond those from before."""
    leftover: int
    """The same once all gradients are cleared and the state is forgotten."""
    stored: set[torch.dtype]


def rest(
    text: str, precision: str, optimizer_name: str, used_before: bool, evaluates: bool, at_most: float
) -> AtRest:
    """After the first step."""
    torch.set_num_threads(1)
    rows = torch.randn(2, WIDTH)
    before = reachable_bytes()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, parallel=text)
    model = BlocksAndRoot(WIDTH, BLOCKS)
    optimizer: Any = make_optimizer(optimizer_name, model)
    if used_before:
        model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = accelerator.prepare(model, optimizer)
    if evaluates:
        with torch.no_grad():
            model(rows)
    accelerator.backward(model(rows).float().sum())
    optimizer.step()
    accelerator.unwrap_model(model)  # an offloaded step is over then
    reachable = settled(lambda: reachable_bytes() - before, at_most)
    held = parts(model, optimizer)
    reported = accelerator.state_bytes()
    stored = {tensor.dtype for tensors in held.values() for tensor in tensors}
    counted = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in held.items()}
    del held
    optimizer.zero_grad()
    optimizer.optimizer.state.clear()
    leftover = settled(lambda: reachable_bytes() - before - counted["weights"], 0.01 * PSI)
    return AtRest(
        counted, (reported.weights, reported.gradients, reported.optimizer), reachable, leftover, stored
    )


REST = [
    *((2, f"zero={stage}", "no", "adamw") for stage in (1, 2, 3)),
    (2, "zero=3", "bf16", "adamw"),
    (4, "zero=3 replicate=2", "bf16", "adamw"),
    (2, "zero=3 offload", "no", "adamw"),
    (2, "zero=3 quantized_weights quantized_gradients", "no", "adamw"),
    (2, "zero=2 activation=full", "no", "sgd"),
]


@pytest.mark.parametrize(("ranks", "text", "precision", "optimizer"), REST)
def test_every_stage_holds_all_state_once_over_its_ranks_and_nothing_else(
    run_distributed: Any, ranks: int, text: str, precision: str, optimizer: str
) -> None:
    plan = Parallel.parse(text)
    shard = ranks // plan.replicate
    state = 8 if optimizer == "adamw" else 0
    at_rest = (8 + state) * PSI / shard
    for found in run_distributed(rest, ranks, text, precision, optimizer, False, False, 1.05 * at_rest):
        assert found.counted == {
            "weights": 4 * PSI // shard,
            "gradients": 4 * PSI // shard,
            "optimizer": state * PSI // shard,
        }
        assert found.stored == {torch.float32}
        assert found.reported[:2] == (found.counted["weights"], found.counted["gradients"])
        assert found.reported[2] == pytest.approx(found.counted["optimizer"], abs=4 * 2 * BLOCKS + 4)
        assert found.reachable == pytest.approx(at_rest, rel=0.05)
        assert found.reachable <= 1.05 * textbook_bytes(PSI, shard, plan.zero, optimizer=state)
        assert found.leftover < 0.01 * PSI


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("used_before", [False, True])
def test_neither_an_earlier_optimizer_nor_an_evaluation_keeps_whole_tensors_alive(
    run_distributed: Any, stage: int, used_before: bool
) -> None:
    for found in run_distributed(rest, 2, f"zero={stage}", "no", "adamw", used_before, True, 1.05 * 8 * PSI):
        assert found.reachable == pytest.approx(8 * PSI, rel=0.05)
        assert found.leftover < 0.01 * PSI


@dataclass
class Within:
    window: int
    """The most bytes alive during the micro-batches of a window."""
    step: int
    """The most during the optimizer's step."""
    after: int


def within(text: str, precision: str, micro_batches: int) -> Within:
    """In the second window, after one that made the optimizer's state."""
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        parallel=text + BY_BLOCK,
        gradient_accumulation_steps=micro_batches,
    )
    model = BlocksAndRoot(WIDTH, BLOCKS)
    model, optimizer = accelerator.prepare(model, make_optimizer("adamw", model))
    rows = torch.randn(ROWS, WIDTH)
    found = Within(0, 0, 0)
    for _ in range(2):
        optimizer.zero_grad()
        with LiveBytes() as live:
            for tensors in parts(model, optimizer).values():
                for tensor in tensors:
                    tensor.detach()  # so that it is seen
            del tensors, tensor
            for _ in range(micro_batches):
                with accelerator.accumulate(model):
                    accelerator.backward(model(rows).float().sum())
                    if accelerator.sync_gradients:
                        found.window, live.peak = live.peak, 0
                    optimizer.step()
            found.step, found.after = live.peak, live.now()
    return found


WITHIN = [
    (2, "zero=1", "no", 3),
    (2, "zero=2", "no", 1),
    (2, "zero=3", "no", 3),
    (2, "zero=1 reduce=fp32", "bf16", 3),
    (4, "zero=2 replicate=2", "no", 3),
]


@pytest.fixture(scope="module")
def measure(worker_pool: WorkerPool) -> Callable[[int, str, str, int], list[Within]]:
    """``within`` of each of so many ranks, run once for the same arguments."""
    return functools.cache(functools.partial(worker_pool.run, within))


@pytest.mark.parametrize(("ranks", "text", "precision", "micro_batches"), WITHIN)
def test_a_window_needs_at_most_what_was_predicted_and_hardly_less(
    measure: Any, ranks: int, text: str, precision: str, micro_batches: int
) -> None:
    plan = Parallel.parse(text)
    row = state_bytes(
        PSI, ranks, plan, precision, "adamw", block=BLOCK, root=ROOT, micro_batches=micro_batches
    )
    for found in measure(ranks, text, precision, micro_batches):
        assert found.window <= row.peak + INPUTS + in_flight(plan)
        # Without accumulation weights are let go while the gradients come, which the prediction leaves out.
        assert found.window > (0.9 if micro_batches > 1 else 0.8) * row.peak
        assert row.at_rest <= found.after <= 1.01 * row.at_rest + in_flight(plan)
        assert row.at_rest <= found.step <= 1.01 * row.at_rest + in_flight(plan)
