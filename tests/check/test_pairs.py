"""No right pair of model and strategy is refused, and a wrong one is, whatever the kernels of the processor.

The kernels are those that this process was started with: ``make test-processors`` starts it under each set.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.check import pairs
from tests.marks import again

USUAL = ("relu", "rms norm", "deep")
"""Kinks, another norm, and the most layers: the pairs whose gradients came nearest to the tolerance."""
WRONG = [
    ("relu", "tp=2", "no", ""),
    ("relu", "zero=3 cp=2", "bf16", ""),
    ("gelu", "zero=3 cp=2", "fp16", ""),
    ("gelu", "tp=2", "no", "bfloat16"),
    ("rms norm", "cp=2", "no", "float16"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernels", ["own", again("coarse")])
@pytest.mark.parametrize("seed", [0, again(1)])
@pytest.mark.parametrize("model", [name if name in USUAL else again(name) for name in pairs.MODELS])
def test_a_right_pair_is_verified(run_distributed: Any, model: str, seed: int, kernels: str) -> None:
    refused = {}
    for ranks in (2, 4):
        first, *_ = run_distributed(
            pairs.said,
            ranks,
            pairs.pairs_of(model, ranks),
            seed,
            is_coarse=kernels == "coarse",
            timeout_s=300,
        )
        refused |= {
            pair: text for pair, text in first.items() if "was verified on the first batch" not in text
        }
    assert not refused


@pytest.mark.parametrize("kernels", ["own", again("coarse")])
def test_a_gradient_that_is_off_by_three_tenths_is_named(run_distributed: Any, kernels: str) -> None:
    for results in run_distributed(
        pairs.said, 2, WRONG, 0, is_wrong=True, is_coarse=kernels == "coarse", timeout_s=180
    ):
        assert all("does not compute what the whole model does" in text for text in results.values()), results
