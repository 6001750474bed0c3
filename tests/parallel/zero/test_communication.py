"""Bytes and collectives of a step under each stage of ZeRO, counted on the Accelerator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lockstep import Accelerator
from lockstep.testing import WorkerPool
from lockstep.utils import Parallel
from parallel.blocks_and_root import BlocksAndRoot

WIDTH, BLOCKS = 64, 3
ROOT = WIDTH * WIDTH
BLOCK = 2 * WIDTH * WIDTH
PSI = BLOCKS * BLOCK + ROOT
GROUPS = BLOCKS + 1
QUANTIZED_BLOCK, SCALE = 256, 4


BY_BLOCK = " blocks=blocks.*"
"""Small models are one group if their blocks are not named."""


class Model(BlocksAndRoot):
    def __init__(self) -> None:
        super().__init__(WIDTH, BLOCKS)


class WithBuffersAndScalars(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(rows)) * self.scale + self.shift


@dataclass
class Sent:
    """By collective: how many, and bytes that this rank sends."""

    count: dict[str, Fraction] = field(default_factory=dict)
    bytes: dict[str, Fraction] = field(default_factory=dict)


def sent_by(counter: Any) -> Sent:
    """On the CPU n ranks gather by n broadcasts, one from each, and scatter by an all-to-all."""
    sent = Sent()
    for one in counter.records:
        name = {"broadcast": "all_gather", "all_to_all": "reduce_scatter"}.get(one.operation, one.operation)
        part = Fraction(1, one.group_size if one.operation == "broadcast" else 1)
        sent.count[name] = sent.count.get(name, 0) + part
        sent.bytes[name] = sent.bytes.get(name, 0) + one.wire_bytes
    return sent


def windows(
    text: str,
    precision: str,
    micro_batches: int,
    clips: bool = False,
    model_type: type[Model] = Model,
    blocks: str = BY_BLOCK,
) -> list[list[Sent]]:
    """For each of two windows after the first, in which ranks compare what they do: what its micro-batches sent, then
    its clipping and its step."""
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, parallel=text + blocks, gradient_accumulation_steps=micro_batches
    )
    model = model_type()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    rows = torch.randn(2, WIDTH)
    found = []
    for _ in range(3):
        sent = []
        for _ in range(micro_batches):
            with accelerator.accumulate(model):
                with accelerator.communication() as backward:
                    accelerator.backward(model(rows).float().sum())
                with accelerator.communication() as step:
                    if clips and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                sent += [sent_by(backward), sent_by(step)]
        found.append(sent)
    return found[1:]


@dataclass(frozen=True)
class Theory:
    """Of one window of k micro-batches, with bytes of a number: ``weight``, ``gradient``, ``average``."""

    ranks: int
    plan: Parallel
    weight: float = 4
    gradient: float = 4
    average: float = 4
    """In the all-reduce over replicas, and in hpz's second all-gather the type of the weights themselves."""
    kept: float = 4

    def bytes(self, k: int) -> dict[str, float]:
        """Stage 1: 2 Psi (N - 1) / N; stage 2 reduces, and stage 3 also gathers twice, at each micro-batch. The
        root group is gathered once in a micro-batch."""
        shard = self.ranks // self.plan.replicate
        ring = (shard - 1) / shard
        gathered = PSI * ring * self.weight
        if self.plan.zero == 3:
            few = self.plan.hpz or shard
            again = (PSI - ROOT) * (few - 1) / few * (self.kept if self.plan.hpz else self.weight)
            gathered = k * (gathered + again)
        reduced = (1 if self.plan.zero == 1 else k) * PSI * ring * self.gradient
        found = {"all_gather": gathered, "reduce_scatter": reduced}
        if self.plan.replicate > 1:
            copies = self.plan.replicate
            found["all_reduce"] = 2 * (copies - 1) / copies * PSI / shard * self.average
        return found

    def counts(self, k: int, groups: int = GROUPS) -> dict[str, int]:
        gathers = groups if self.plan.zero < 3 else k * (groups + BLOCKS)
        reduces = groups * (1 if self.plan.zero == 1 else k)
        found = {"all_gather": gathers, "reduce_scatter": reduces}
        return found | ({"all_reduce": groups} if self.plan.replicate > 1 else {})


def merged(window: list[Sent]) -> Sent:
    total = Sent()
    for one in window:
        for name, count in one.count.items():
            total.count[name] = total.count.get(name, 0) + count
            total.bytes[name] = total.bytes.get(name, 0) + one.bytes[name]
    return total


INT8 = 1 + SCALE / QUANTIZED_BLOCK
INT4 = 1 / 2 + SCALE / QUANTIZED_BLOCK
HALF = {"weight": 2, "gradient": 2, "average": 2, "kept": 2}
CASES: list[Any] = [
    *((2, f"zero={stage}", "no", {}) for stage in (1, 2, 3)),
    (4, "zero=1 replicate=2", "no", {}),
    (4, "zero=3 replicate=2", "no", {}),
    (4, "zero=3 hpz=2", "bf16", HALF),
    (2, "zero=2 reduce=fp32", "bf16", HALF | {"gradient": 4}),
    (4, "zero=3 replicate=2 reduce=fp32", "bf16", HALF | {"gradient": 4, "average": 4}),
    (2, "zero=3 offload", "no", {}),
    (2, "zero=3 quantized_weights quantized_gradients=int8", "no", {"weight": INT8, "gradient": INT8}),
    (2, "zero=1 quantized_gradients=int4", "bf16", HALF | {"gradient": INT4}),
    (4, "zero=3 hpz=2 quantized_weights", "bf16", HALF | {"weight": INT8}),
    (4, "zero=2 replicate=2 quantized_gradients", "no", {"gradient": INT8}),
]


MICRO_BATCHES = (1, 3)


def windows_of_each(text: str, precision: str) -> dict[int, list[list[Sent]]]:
    return {count: windows(text, precision, count) for count in MICRO_BATCHES}


@pytest.fixture(scope="module")
def measure(worker_pool: WorkerPool) -> Callable[[int, str, str], list[dict[int, list[list[Sent]]]]]:
    """``windows_of_each`` of each of so many ranks, run once for the same arguments."""
    return functools.cache(functools.partial(worker_pool.run, windows_of_each))


@pytest.mark.parametrize(("ranks", "text", "precision", "widths"), CASES)
def test_a_step_sends_what_theory_says_in_one_collective_for_each_group(
    measure: Any, ranks: int, text: str, precision: str, widths: dict[str, float]
) -> None:
    theory = Theory(ranks, Parallel.parse(text), **widths)
    for found in measure(ranks, text, precision):
        for micro_batches in MICRO_BATCHES:
            for window in found[micro_batches]:
                sent = merged(window)
                assert sent.bytes == theory.bytes(micro_batches), micro_batches
                assert sent.count == theory.counts(micro_batches), micro_batches


def bare() -> Sent:
    """What the second step of torch's own ``fully_shard`` sends."""
    accelerator = Accelerator(cpu=True, parallel="zero=3")
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with accelerator.communication() as counter:
            model(torch.randn(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return sent_by(counter)


def test_a_step_sends_what_torchs_own_sends(run_distributed: Any, measure: Any) -> None:
    for of_torch, found in zip(run_distributed(bare, 2), measure(2, "zero=3", "no"), strict=True):
        ours = merged(found[1][1])
        assert (ours.count, ours.bytes) == (of_torch.count, of_torch.bytes)


@pytest.mark.parametrize(("ranks", "text"), [(2, "zero=1"), (2, "zero=2"), (4, "zero=2 replicate=2")])
def test_a_small_model_sends_the_same_bytes_in_one_collective(
    run_distributed: Any, ranks: int, text: str
) -> None:
    theory = Theory(ranks, Parallel.parse(text))
    for both in run_distributed(windows, ranks, text, "no", 3, blocks=""):
        for window in both:
            assert merged(window).bytes == theory.bytes(3)
            assert merged(window).count == theory.counts(3, groups=1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_sent_by_the_step_nor_by_calls_that_do_nothing_inside_a_window(
    measure: Any, stage: int
) -> None:
    for found in measure(2, f"zero={stage}", "no"):
        for window in found[3]:
            assert [one.count for one in window[1::2]] == [{}, {}, {}]


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_are_gathered_in_the_first_micro_batch_of_a_window_alone(measure: Any, stage: int) -> None:
    for found in measure(2, f"zero={stage}", "no"):
        for window in found[3]:
            gathers = [one.count.get("all_gather", 0) for one in window[::2]]
            reduces = [one.count.get("reduce_scatter", 0) for one in window[::2]]
            assert gathers == [GROUPS, 0, 0]
            assert reduces == ([0, 0, GROUPS] if stage == 1 else [GROUPS] * 3)


@pytest.mark.parametrize(("ranks", "text"), [(2, "zero=1"), (2, "zero=3"), (4, "zero=3 replicate=2")])
def test_clipping_adds_one_reduction_of_one_number(run_distributed: Any, ranks: int, text: str) -> None:
    plan = Parallel.parse(text)
    shard = ranks // plan.replicate
    for both in run_distributed(windows, ranks, text, "no", 1, clips=True):
        for _, clipping in both:
            assert clipping.count == {"all_reduce": 1}
            assert clipping.bytes == {"all_reduce": 2 * (shard - 1) / shard * 4}


def test_scalars_and_buffers_add_one_small_collective_each(run_distributed: Any) -> None:
    theory = Theory(2, Parallel(zero=2))
    for both in run_distributed(windows, 2, "zero=2", "no", 1, model_type=WithBuffersAndScalars):
        for window in both:
            sent = merged(window)
            buffers = 2  # running statistics in fp32, and the int64 count of batches
            assert sent.count == theory.counts(1) | {"all_reduce": 1, "all_gather": GROUPS + buffers / 2}
            scalars = 2 * 4
            assert sent.bytes["all_reduce"] == scalars
            assert sent.bytes["all_gather"] == theory.bytes(1)["all_gather"] + (2 * WIDTH * 4 + 8) / 2


def nested(text: str) -> list[Sent]:
    """Of a backward in a context within another that holds averaging back, one after the inner, one after both."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=text + BY_BLOCK)
    model = accelerator.prepare(WithBuffersAndScalars())

    def backward() -> Sent:
        loss = model(torch.ones(4, WIDTH)).mean()
        with accelerator.communication() as counter:
            accelerator.backward(loss)
        return sent_by(counter)

    with accelerator.no_sync(model):
        with accelerator.no_sync(model):
            inner = backward()
        outer = backward()
    return [inner, outer, backward()]


@pytest.mark.parametrize(("ranks", "text"), [(2, "zero=1"), (2, "zero=3"), (4, "zero=2 replicate=2")])
def test_leaving_a_nested_no_sync_does_not_end_the_outer_one(
    run_distributed: Any, ranks: int, text: str
) -> None:
    for backwards in run_distributed(nested, ranks, text):
        reduced = [
            {name: count for name, count in sent.count.items() if name != "all_gather"} for sent in backwards
        ]
        assert reduced[:2] == [{}, {}]
        assert reduced[2]["reduce_scatter"] == GROUPS


def evaluations(text: str) -> list[Sent]:
    """Of two forwards without gradients and then the forward of a step, before and after that step."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=text + BY_BLOCK)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    rows = torch.randn(2, WIDTH)
    found = []
    for _ in range(2):
        model.eval()
        for _ in range(2):
            with torch.no_grad(), accelerator.communication() as counter:
                model(rows)
            found.append(sent_by(counter))
        model.train()
        with accelerator.communication() as counter:
            loss = model(rows).sum()
        found.append(sent_by(counter))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_evaluation_gathers_each_weight_once_and_leaves_none_for_the_next(
    run_distributed: Any, stage: int
) -> None:
    for found in run_distributed(evaluations, 2, f"zero={stage}"):
        assert [one.bytes for one in found] == [{"all_gather": PSI * 4 / 2}] * 6
        assert [one.count for one in found] == [{"all_gather": GROUPS}] * 6
