"""Bytes sent against the formulas of the papers, written out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan import ModelSize, sent_bytes
from lockstep.utils import Parallel

PSI = 2**20
psis, ranks, windows = st.integers(1, 10**12), st.integers(2, 10**4), st.integers(1, 100)


def sent(text: str, n: int, precision: str = "no", psi: int = PSI, k: int = 1, root: int = 0):
    return sent_bytes(ModelSize(psi, psi, root=root), n, Parallel.parse(text), precision, k)


@given(psis, ranks, windows)
def test_fp32_elements_of_every_stage(psi: int, n: int, k: int) -> None:
    ring = psi * (n - 1) / n
    expected = {"ddp": 2, "zero=1": 2, "zero=2": 1 + k, "zero=3": 3 * k}
    for text, times in expected.items():
        assert sent(text, n, psi=psi, k=k).total == pytest.approx(4 * times * ring, rel=1e-9, abs=3)


@pytest.mark.parametrize("k", [1, 3])
def test_a_root_group_is_gathered_once_for_each_micro_batch(k: int) -> None:
    assert sent("zero=3", 4, k=k, root=PSI // 4).all_gather == 4 * k * (2 * PSI - PSI // 4) * 3 // 4
    assert sent("zero=3", 4, k=k, root=PSI).all_gather == 4 * k * PSI * 3 // 4


def test_replicas_average_their_shards_once_a_step() -> None:
    for k in (1, 5):
        traffic = sent("zero=2 replicate=4", 32, k=k)
        assert traffic.all_reduce == 4 * 2 * (PSI // 8) * 3 // 4
        assert traffic.reduce_scatter == k * 4 * PSI * 7 // 8


def test_hpz_gathers_the_second_time_among_neighbours() -> None:
    assert sent("zero=3 hpz=4", 16).all_gather == 4 * PSI * 15 // 16 + 4 * PSI * 3 // 4


def test_quantised_forms_send_their_integers_and_a_scale_for_256() -> None:
    assert sent("zero=1 quantized_weights", 4).all_gather == (PSI + 4 * PSI // 256) * 3 // 4
    assert sent("zero=1 quantized_gradients", 4, "bf16").reduce_scatter == (PSI + 4 * PSI // 256) * 3 // 4
    int4 = sent("zero=2 quantized_gradients=int4", 4, k=2)
    assert int4.reduce_scatter == 2 * (PSI // 2 + 4 * PSI // 256) * 3 // 4
    exact_in_backward = sent("zero=3 quantized_weights hpz=2", 4, "bf16").all_gather
    assert exact_in_backward == (PSI + 4 * PSI // 256) * 3 // 4 + 2 * PSI // 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_mixed_precision_halves_what_stages_send_but_not_ddp(stage: int) -> None:
    assert sent(f"zero={stage}", 8, "bf16").total * 2 == sent(f"zero={stage}", 8).total
    assert sent("ddp", 8, "bf16") == sent("ddp", 8)


def test_frozen_weights_are_gathered_and_their_gradients_are_not_sent() -> None:
    traffic = sent_bytes(ModelSize(PSI, PSI // 2), 4, Parallel(zero=2), "no")
    assert traffic.all_gather == 2 * traffic.reduce_scatter == 4 * PSI * 3 // 4
