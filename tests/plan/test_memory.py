"""The arithmetic of memory against the ZeRO paper, textbook formulas and torch's optimizers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.plan import OPTIMIZERS, MemoryRow, parse_count, state_bytes, textbook_bytes
from lockstep.utils import Parallel
from tests.refusals import expect_refusal

PSI = 10**9
STAGES = ("zero=1", "zero=2", "zero=3")
PRECISIONS = ("no", "bf16", "fp16")
parameters = st.integers(1, 10**13)
ranks = st.integers(1, 10**5)
plans = st.sampled_from(
    [
        "ddp",
        *STAGES,
        "zero=2 reduce=fp32",
        "zero=3 offload",
        "zero=1 quantized_gradients",
        "offload=optimizer",
        "zero=2 offload=params offload_to=/disk",
    ]
)
precisions = st.sampled_from(PRECISIONS)
optimizers = st.sampled_from(list(OPTIMIZERS))


def row(text: str, n: int, precision: str = "no", psi: int = PSI, **options: Any) -> MemoryRow:
    return state_bytes(psi, n, Parallel.parse(text), precision, **options)


# -- the paper ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_paper_example_of_7_5_billion_parameters_on_64_ranks(stage: int, gigabytes: float) -> None:
    paper = textbook_bytes(7_500_000_000, 64, stage, weights=2, gradients=2, optimizer=12)
    assert round(paper / 1e9, 1) == gigabytes
    if stage:
        assert row(f"zero={stage}", 64, "fp16", psi=7_500_000_000).textbook == paper


@given(parameters, ranks)
def test_the_textbook_formulas_in_fp32(psi: int, n: int) -> None:
    expected = {0: 16 * psi, 1: (4 + 4 + 8 / n) * psi, 2: (4 + 12 / n) * psi, 3: 16 / n * psi}
    for stage, number in expected.items():
        assert textbook_bytes(psi, n, stage) == pytest.approx(number, rel=1e-12, abs=1)


def test_the_textbook_counts_weights_alone_of_frozen_parameters() -> None:
    # 4 bytes of 90 frozen parameters are whole until stage 3; the 10 others have 4 + 4 + 8
    expected = {1: 90 * 4 + 10 * (4 + 4 + 4), 2: 90 * 4 + 10 * (4 + 6), 3: (90 * 4 + 10 * 16) / 2}
    for stage, number in expected.items():
        assert row(f"zero={stage}", 2, psi=100, trainable=10).textbook == number


# -- at rest --------------------------------------------------------------------------------------------


@given(parameters, precisions)
def test_one_process_has_16_bytes_a_parameter_whatever_the_strategy(psi: int, precision: str) -> None:
    for text in ("ddp", "dataparallel", *STAGES, "zero=3 replicate=2"):
        alone = row(text, 1, precision, psi)
        assert (alone.weights, alone.gradients, alone.optimizer) == (4 * psi, 4 * psi, 8 * psi)
        assert alone.at_rest == alone.peak == alone.device == 16 * psi
        assert alone.sent.total == 0
        assert alone.textbook == 16 * psi


@given(parameters, st.integers(2, 10**5), precisions)
def test_ddp_has_20_bytes_a_parameter_on_every_rank(psi: int, n: int, precision: str) -> None:
    ddp = row("ddp", n, precision, psi)
    assert ddp.at_rest == ddp.peak == 20 * psi
    assert ddp == row("auto", n, precision, psi)


@given(parameters, st.integers(2, 10**5), precisions, st.sampled_from(STAGES))
def test_every_stage_has_16_bytes_over_n_at_rest(psi: int, n: int, precision: str, stage: str) -> None:
    at_rest = row(stage, n, precision, psi).at_rest
    assert 16 * psi / n <= at_rest < 16 * (psi / n + 1)


@given(parameters, ranks, plans, precisions, optimizers)
def test_the_parts_add_up(psi: int, n: int, text: str, precision: str, optimizer: str) -> None:
    one = row(text, n, precision, psi, optimizer=optimizer)
    at_rest = one.weights + one.gradients + one.optimizer + one.buckets + one.copies
    assert at_rest == one.at_rest == one.device + one.host + one.disk
    assert (one.host + one.disk > 0) == ("offload" in text)
    assert one.host + one.fetched <= one.host_peak <= one.host + one.fetched + one.disk
    parts = (one.gathered_weights, one.kept_weights, one.unreduced_gradients, one.block_gradients)
    assert one.device <= one.peak <= one.device + sum(parts)


@given(parameters, st.integers(2, 1000), st.integers(1, 100), st.sampled_from(STAGES), precisions)
def test_a_rank_of_replicated_groups_has_what_one_of_a_group_has(
    psi: int, group: int, groups: int, stage: str, precision: str
) -> None:
    hybrid = row(f"{stage} replicate={groups}", group * groups, precision, psi)
    alone = row(stage, group, precision, psi)
    assert (hybrid.at_rest, hybrid.textbook) == (alone.at_rest, alone.textbook)
    assert alone.peak <= hybrid.peak <= alone.peak + hybrid.averaged_gradients
    averages_apart = groups > 1 and precision != "no"
    assert hybrid.averaged_gradients == (math.ceil(2 * Fraction(psi, group)) if averages_apart else 0)
    assert hybrid.sent.all_gather == alone.sent.all_gather
    assert hybrid.sent.reduce_scatter == alone.sent.reduce_scatter


# -- within a step --------------------------------------------------------------------------------------

# 8 ranks, 1000 parameters, of them 40 in no block, blocks of 96. Bytes a parameter:
# stage, precision -> gathered weights, unreduced gradients, gradients of a block
WITHIN = {
    ("zero=1", "no"): (4 * 1000, 4 * 1000, 8 * 96),
    ("zero=1", "bf16"): (2 * 1000, 2 * 1000, 4 * 96),
    ("zero=1 reduce=fp32", "bf16"): (2 * 1000, 4 * 1000, 8 * 96),
    ("zero=2", "no"): (4 * 1000, 0, 8 * 96),
    ("zero=2", "fp16"): (2 * 1000, 0, 4 * 96),
    ("zero=2 reduce=fp32", "fp16"): (2 * 1000, 0, 6 * 96),
    ("zero=3", "no"): (4 * (2 * 96 + 40), 0, 8 * 96),
    ("zero=3", "bf16"): (2 * (2 * 96 + 40), 0, 4 * 96),
    ("zero=3 quantized_weights quantized_gradients=int4", "bf16"): (2 * (2 * 96 + 40), 0, 4 * 96),
}


@pytest.mark.parametrize(("text", "precision"), WITHIN)
def test_what_is_whole_within_a_step(text: str, precision: str) -> None:
    one = row(text, 8, precision, psi=1000, block=96, root=40)
    assert (one.gathered_weights, one.unreduced_gradients, one.block_gradients) == WITHIN[text, precision]
    shards = 4 * 1000 // 8
    whole = one.gathered_weights + max(one.unreduced_gradients, shards) + one.block_gradients
    assert one.peak == (4 + 8) * 1000 // 8 + whole


# of 1000 parameters with AdamW on two ranks of ZeRO: bytes at rest on device, host and disk. Of 500 parameters,
# 2000 are weights, 2000 gradients, 4000 the optimizer's state; its copies are 2000 more where the device has weights
PLACES = {
    "zero=2": (8000, 0, 0),
    "zero=2 offload": (0, 8000, 0),
    "zero=2 offload=params": (0, 8000, 0),
    "zero=2 offload=optimizer": (2000 + 2000, 4000 + 2000, 0),
    "zero=2 offload offload_to=/disk": (0, 0, 8000),
    "zero=2 offload=params offload_to=/disk": (0, 4000, 4000),
    "zero=2 offload=optimizer offload_to=/disk": (2000 + 2000, 0, 4000 + 2000),
}


@pytest.mark.parametrize("text", PLACES)
def test_each_part_rests_where_offload_says(text: str) -> None:
    for ranks, words, factor in ((2, text, 1), (1, text, 2), (1, text.removeprefix("zero=2 "), 2)):
        one = row(words, ranks, psi=1000) if words != "zero=2" else row("zero=2", ranks, psi=1000)
        assert (one.device, one.host, one.disk) == tuple(factor * part for part in PLACES[text])


def test_offloaded_weights_are_on_the_device_four_blocks_at_a_time() -> None:
    one = row("offload", 1, psi=1000, block=96, root=40)
    assert (one.device, one.gathered_weights, one.block_gradients) == (0, 4 * 4 * 96, 4 * 2 * 96)
    assert one.peak == 4 * 6 * 96
    assert row("offload", 1, psi=1000, block=40, root=96).peak == 4 * 6 * 96  # the root group may be larger
    assert row("offload", 1, psi=1000, block=96, largest_group=50).peak == 4 * 6 * 50
    assert row("offload offload_budget=3000", 1, psi=1000, block=96).gathered_weights == 3000
    assert row("offload", 1, psi=1000, block=900).peak == 4 * 1000 + 4 * 1000  # and never more than there is


def test_three_blocks_of_what_is_on_disk_are_in_host_memory_while_the_optimizer_steps() -> None:
    assert row("offload offload_to=/disk", 1, psi=1000, block=100).host_peak == 16 * 300
    assert row("offload=params offload_to=/disk", 1, psi=1000, block=100).host_peak == 8 * 1000 + 8 * 300
    assert row("offload offload_to=/disk zero=3", 4, psi=1000, block=100).host_peak == 16 * 300 // 4
    assert row("offload", 1, psi=1000, block=100).host_peak == 16 * 1000


def test_a_host_that_steps_has_copies_of_weights_and_gradients() -> None:
    one = row("offload=optimizer", 2, psi=1000, block=100)
    assert one.device == one.peak == 4 * 1000 + 4 * 1000 + 4 * 1000  # weights, gradients and buckets
    assert (one.host, one.host_peak) == (8 * 1000 + 4 * 1000, 8 * 1000 + 4 * 1000 + 4 * 1000)
    on_disk = row("offload=optimizer offload_to=/disk", 1, psi=1000, block=100)
    assert (on_disk.host, on_disk.host_peak, on_disk.disk) == (0, 12 * 300 + 4 * 1000, 12 * 1000)


def test_hpz_keeps_a_part_of_the_blocks_in_the_type_of_the_computation() -> None:
    assert row("zero=3 hpz=2", 8, "bf16", psi=1000, root=40).kept_weights == 2 * 960 // 2
    assert row("zero=3 hpz=4", 8, "no", psi=1000).kept_weights == 4 * 1000 // 4


def test_shards_wait_for_the_other_replicas_until_the_window_ends() -> None:
    waiting = {k: row("zero=2 replicate=2", 8, psi=1000, micro_batches=k).unreduced_gradients for k in (1, 3)}
    assert waiting == {1: 0, 3: 4 * 1000 // 4}


# -- optimizers -----------------------------------------------------------------------------------------

TORCH = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}


def test_every_optimizer_but_lion_is_compared_with_torch() -> None:
    assert set(TORCH) == set(OPTIMIZERS) - {"lion"}


@pytest.mark.parametrize("name", TORCH)
def test_torch_keeps_as_much_state_as_the_table_says(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(32, 32))
    optimizer: Any = TORCH[name]([weight])
    weight.square().sum().backward()
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.ndim]
    assert sum(tensor.nbytes for tensor in state) == OPTIMIZERS[name] * weight.numel()
    assert row("zero=3", 4, psi=1024, optimizer=name).optimizer == OPTIMIZERS[name] * 256


# -- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"psi": 0}, "parameters=0"),
        ({"psi": 10**16}, "parameters=10000000000000000"),
        ({"n": 0}, "ranks=0"),
        ({"trainable": PSI + 1}, "trainable=1000000001"),
        ({"root": -1}, "root=-1"),
        ({"root": PSI, "block": 1}, "block=1"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"precision": "fp4"}, "mixed_precision=fp4"),
        ({"precision": "bf61"}, "Did you mean 'bf16'?"),
        ({"optimizer": "adafactor"}, "Use one of adamw, adam, nadam"),
        ({"text": "zero=3 replicate=3"}, "Set replicate to a divisor of 4"),
        ({"text": "zero=3 hpz=3"}, "hpz=3 must divide the 4 ranks"),
        ({"text": "dataparallel"}, "is one process, but there are 4"),
        ({"text": "offload"}, "each of the 4 processes"),
    ],
)
def test_bad_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    expect_refusal(ConfigError, message, row, **({"text": "zero=3", "n": 4} | options))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1.3B", 1_300_000_000),
        ("350M", 350_000_000),
        ("7e9", 7_000_000_000),
        ("124439808", 124_439_808),
        ("70b", 70 * 10**9),
        ("1.5e3k", 1_500_000),
        ("1000T", 10**15),
        (" 1 ", 1),
    ],
)
def test_numbers_of_parameters_as_people_write_them(text: str, number: int) -> None:
    assert parse_count(text, "--params") == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-3",
        "0",
        "1.5",
        "1.3X",
        "B",
        "1e99B",
        "1e400",
        "9" * 5000,
        "1001T",
        "1,000",
        "nan",
        "inf",
        "٣",
        "1e-3B",
    ],
)
def test_other_texts_are_not_numbers_of_parameters(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_count(text, "--params")
