"""The first batch proves a split: what differs stops the run before its first step, and the rest leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import Accelerator
from lockstep.errors import ConfigError
from tests.marks import again
from tests.refusals import expect_refusal
from tests.verify import cells, changing

WRONG: dict[str, tuple[str, dict[str, str]]] = {
    "gradient": ("tp=2", {"kind": "gradient"}),
    "counter": ("pp=2", {"kind": "late counter"}),
    "batchnorm": ("pp=2", {"kind": "batchnorm"}),
    "raises": ("pp=2 micro_batches=4", {"kind": "raises"}),
    "positions": ("cp=2", {"kind": "positions"}),
    "pooled": ("cp=2 cp_method=ulysses", {"loss": "pooled"}),
}
SAID = {
    "gradient": ["the gradient of 'blocks.1.", "begins in module 'blocks.1'", "tp_plan"],
    "counter": ["LanguageModel", "blocks.1"],
    "batchnorm": ["blocks.1.norm1"],
    "raises": ["KeyError", "micro-batches are not what this takes", "one of the 4 micro-batches"],
    "positions": ["'blocks.1'", "mix positions before or after the blocks"],
    "pooled": ["loss", "LanguageModel's own forward", "positions"],
}
RIGHT: dict[str, tuple[str, dict[str, str]]] = {
    "tp": ("tp=2", {}),
    "tp split loss": ("tp=2 loss_parallel", {"loss": "none"}),
    "tp counter": ("tp=2", {"kind": "counter"}),
    "pp": ("pp=2", {}),
    "pp noise": ("pp=2", {"kind": "noise"}),
    "cp": ("cp=2", {}),
}


def test_what_differs_is_named_before_the_first_step(run_distributed: Any) -> None:
    ranks = run_distributed(cells.table, 2, WRONG, timeout_s=180)
    for results in ranks:
        for name, (text, has_changed) in results.items():
            assert [part for part in SAID[name] if part not in text] == [], (name, text)
            assert not has_changed, name
    for name in WRONG.keys() - {"raises"}:
        assert ranks[0][name] == ranks[1][name]


def test_what_is_right_is_said_once(run_distributed: Any) -> None:
    first, second = run_distributed(cells.table, 2, RIGHT, timeout_s=180)
    parameters = len(list(cells.LanguageModel().parameters()))
    for name, (text, has_stepped) in first.items():
        what = "outputs" if RIGHT[name][1].get("loss") == "none" else "loss"
        assert f"verified on the first batch: {what} and {parameters} gradients" in text, name
        assert has_stepped and second[name] == ("", True)


@pytest.mark.parametrize(
    ("world_size", "parallel", "accumulation", "kind", "loss"),
    [
        (2, "tp=2", 2, "counter", "mean"),
        (2, "pp=2", 1, "", "mean"),
        (2, "cp=2", 2, "noise", "none"),
        again(4, "zero=3 tp=2", 2, "", "mean"),
    ],
)
def test_it_leaves_no_trace(
    run_distributed: Any, world_size: int, parallel: str, accumulation: int, kind: str, loss: str
) -> None:
    def run(verify: str) -> Any:
        line = f"{parallel} verify={verify}"
        return run_distributed(cells.trained, world_size, line, accumulation, kind, loss, timeout_s=120)

    for with_it, without in zip(run("every:2"), run("off"), strict=True):
        assert with_it.keys() == without.keys()
        different = [
            name
            for name, value in without.items()
            if not (
                torch.equal(value, with_it[name])
                if isinstance(value, torch.Tensor)
                else value == with_it[name]
            )
        ]
        assert different == []


IN_HALF = {
    f"{precision} {kind or 'right'}": (
        f"zero=3 cp=2 cp_method={cp_method}",
        {"mixed_precision": precision, "kind": kind},
    )
    for precision, kind, cp_method in (
        ("bf16", "", "ulysses"),
        ("bf16", "tenth", "ring"),
        ("fp16", "tenth", "ulysses"),
    )
}


def test_a_gradient_that_is_off_by_a_tenth_is_seen_in_half_precision(run_distributed: Any) -> None:
    """The tolerance is what rounding explains, not the quarter that any gradient may be rounded by."""
    for rank, results in enumerate(run_distributed(cells.table, 2, IN_HALF, timeout_s=180)):
        for name, (text, _) in results.items():
            if "right" in name:
                assert rank > 0 or "was verified on the first batch" in text, (name, text)
                continue
            assert "the gradient of 'blocks." in text, (name, text)
            assert abs(float(text.split("is off by ")[1].split("%")[0]) - 10) < 4, (name, text)


def test_a_loss_outside_of_a_pipeline_is_compared_too(run_distributed: Any) -> None:
    for text in run_distributed(cells.by_train_step, 2, "pp=2 loss=mean", "sum"):
        assert "the loss is" in text and "1/8 of it" in text
    assert "was verified" in run_distributed(cells.by_train_step, 2, "pp=2", "mean")[0]


@pytest.mark.parametrize("value", ["every", "every:0", "every:x", "sometimes", "first"])
def test_other_words_are_refused(value: str) -> None:
    expect_refusal(ConfigError, "verify", Accelerator, cpu=True, parallel={"tp": 1, "verify": value})


def test_a_setting_that_makes_a_pipeline_wrong_is_caught_by_a_later_proof(run_distributed: Any) -> None:
    given = ("blocks.1", "centres", [False, False, True], "pp=2 verify=every:1")
    for _, text, steps in run_distributed(changing.changed, 2, *given, timeout_s=60):
        assert "in training call 3" in text
        assert steps == 2


def test_a_setting_that_is_set_back_is_set_back_in_the_whole_model(run_distributed: Any) -> None:
    given = ("", "reduction", ["mean", "sum", "mean"], "pp=2 loss=whole verify=every:1")
    (lines, *first), (_, *second) = run_distributed(changing.changed, 2, *given, timeout_s=60)
    assert len(lines) >= 3 and first == second == ["", 3]
