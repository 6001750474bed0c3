"""No right pair of model and strategy is refused, and a wrong one is, whatever the kernels of the processor.

The kernels are those that this process was started with: ``make test-processors`` starts it under each set.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.marks import again
from tests.verify import pairs

CHOSEN = {
    2: [
        ("relu", "tp=2", "no", ""),
        ("deep", "pp=2", "no", ""),
        ("rms norm", "cp=2", "no", ""),
        ("relu", "cp=2 cp_method=ulysses", "no", ""),
        ("relu", "zero=3 cp=2", "bf16", ""),
        ("rms norm", "zero=3 cp=2", "fp16", ""),
        ("deep", "tp=2", "no", "bfloat16"),
        ("rms norm", "pp=2", "no", "float16"),
    ],
    4: [("relu", "zero=3 tp=2", "bf16", ""), ("deep", "zero=3 tp=2", "fp16", "")],
}
"""Each strategy and each type once, with kinks, another norm and the most layers: models whose gradients came nearest
to the tolerance."""
WRONG = [
    ("relu", "tp=2", "no", ""),
    ("relu", "zero=3 cp=2", "bf16", ""),
    ("gelu", "zero=3 cp=2", "fp16", ""),
    ("gelu", "tp=2", "no", "bfloat16"),
    ("rms norm", "cp=2", "no", "float16"),
]
KERNELS = pytest.mark.parametrize("kernels", ["own", again("coarse")])


@pytest.mark.timeout(600)
@KERNELS
@pytest.mark.parametrize(
    ("model", "seed"), [("", 0), *[again(name, seed) for name in pairs.MODELS for seed in (0, 1)]]
)
def test_a_right_pair_is_verified(run_distributed: Any, model: str, seed: int, kernels: str) -> None:
    for ranks, chosen in CHOSEN.items():
        all_of_it = pairs.pairs_of(model, ranks) if model else chosen
        first, *_ = run_distributed(
            pairs.said, ranks, all_of_it, seed, is_coarse=kernels == "coarse", timeout_s=300
        )
        assert [text for text in first.values() if "was verified on the first batch" not in text] == []


@KERNELS
def test_a_gradient_that_is_off_by_three_tenths_is_named(run_distributed: Any, kernels: str) -> None:
    for results in run_distributed(
        pairs.said, 2, WRONG, 0, is_wrong=True, is_coarse=kernels == "coarse", timeout_s=180
    ):
        assert all("does not compute what the whole model does" in text for text in results.values()), results
