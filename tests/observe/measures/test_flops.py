"""Operations of a step, against the formula for a GPT and against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep import Accelerator
from lockstep.history import read_lines
from parallel.split_problem import gpt, make_llama
from tests.observe.measures.loops import train_on

LAYERS, WIDTH, LENGTH, VOCABULARY, ROWS, STEPS = 2, 32, 16, 64, 8, 3

# 2 operations for each parameter and token, twice that in backward; scores and their product with the values.
PRODUCTS = LAYERS * 12 * WIDTH * WIDTH + VOCABULARY * WIDTH
ATTENTION = 12 * LAYERS * WIDTH * LENGTH
FORMULA = (6 * PRODUCTS + ATTENTION) * ROWS * LENGTH
# Nothing needs the result of a block's last product, [4 width, width], again.
BLOCKS_AGAIN = (2 * LAYERS * 8 * WIDTH * WIDTH + ATTENTION / 3) * ROWS * LENGTH
SCORES_AGAIN = ATTENTION / 6 * ROWS * LENGTH


def made(kind: str) -> nn.Module:
    if kind == "llama":
        return make_llama(LAYERS)
    return gpt(vocabulary=VOCABULARY, context=LENGTH, width=WIDTH, layers=LAYERS, heads=4)


def train(
    accelerator: Accelerator,
    kind: str = "gpt",
    by_train_step: bool = False,
    steps: int = STEPS,
    wanted: Any = lambda: False,
) -> None:
    """``steps`` steps on 8 rows of all ranks each, or fewer if what is ``wanted`` is there."""
    rows = ROWS // accelerator.meshes.data_size
    model: Any = made(kind)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, VOCABULARY, (ROWS * STEPS, LENGTH))
    loader: Any = torch.utils.data.DataLoader(tokens, batch_size=rows)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def loss_of(output: Any, targets: torch.Tensor) -> torch.Tensor:
        logits = getattr(output, "logits", output)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    done = 0
    while done < steps:
        for batch in loader:
            if by_train_step:
                accelerator.train_step(model, loss_of, batch, batch)
            else:
                accelerator.backward(loss_of(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        if accelerator.reduce(torch.tensor(float(wanted())), "max") > 0:
            break
    accelerator.end_training()


@pytest.mark.parametrize(("parallel", "again"), [("", 0), ("activation=full", BLOCKS_AGAIN)])
def test_a_gpt_computes_what_the_formula_says(parallel: str, again: float) -> None:
    accelerator = Accelerator(parallel=parallel)
    train(accelerator)
    steps = [step.flops for step in accelerator.measures.recent]
    assert steps[0] is None  # the first is left alone
    assert steps[1] == steps[2] == {"model": FORMULA, "hardware": FORMULA + SCORES_AGAIN + again}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_models_own_checkpointing_is_seen(reentrant: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)  # type: ignore[no-any-return]

    accelerator = Accelerator()
    train_on(accelerator, Twice(), 2 * [torch.randn(4, 8)])
    forward = 2 * 4 * (8 * 16 + 16 * 8)
    # A checkpoint that can stop early does without what nothing needs again: the last product.
    again = forward if reentrant else forward // 2
    latest = accelerator.measures.latest
    assert latest is not None
    assert latest.flops == {"model": 3 * forward, "hardware": 3 * forward + again}


def test_windows_and_other_shapes_add_up() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    sizes = [(4, 4), (3, 5), (3, 5), (5, 3), (2, 3)]
    train_on(accelerator, nn.Linear(8, 4), [torch.randn(rows, 8) for window in sizes for rows in window])
    found = [step.flops and step.flops["model"] for step in accelerator.measures.recent]
    # inputs have no gradient
    assert found == [None, *(2 * 2 * 8 * 4 * sum(window) for window in sizes[1:])]


def test_operators_that_nobody_can_count_make_operations_unknown() -> None:
    @torch.library.custom_op("lockstep_test::product", mutates_args=())
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    product.register_autograd(lambda ctx, grad: (grad, None))

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> Any:
            return product(self.weight, x)

    accelerator = Accelerator()
    train_on(accelerator, Custom(), 3 * [torch.randn(4, 4)])
    assert [step.flops for step in accelerator.measures.recent] == [None] * 3
    assert "lockstep_test::product" in accelerator.measures.flops_unknown_because
    assert accelerator.measures.mfu is None


def test_a_script_says_what_cannot_be_counted() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    counted: list[dict[str, float]] = [{}, {}, {"hardware": 150}, {"hardware": 150}]

    def count(number: int) -> None:
        if number < len(counted):
            accelerator.measures.count_flops(100, **counted[number])

    model = torch.compile(nn.Linear(8, 4), backend="eager")
    train_on(accelerator, model, 6 * [torch.randn(4, 8)], count)
    assert [step.flops for step in accelerator.measures.recent] == [
        {"model": 200, "hardware": 200},
        {"model": 200, "hardware": 300},
        None,
    ]
    assert "torch.compile" in accelerator.measures.flops_unknown_because


def of_this_rank(cases: list[tuple[str, str, bool]]) -> list[Any]:
    """(model, hardware) operations of a step on this rank, case by case."""
    found = []
    for kind, parallel, by_train_step in cases:
        accelerator = Accelerator(parallel=parallel)
        train(accelerator, kind, by_train_step)
        counts = accelerator.measures._ended.counts
        assert counts is not None, (kind, parallel, accelerator.measures.flops_unknown_because)
        found.append((counts.model, counts.hardware))
    return found


SPREAD = ["ddp", "zero=1", "zero=3", "zero=3 activation=full", "tp=2", "pp=2"]
CASES = [
    *(("gpt", parallel, False) for parallel in SPREAD),
    ("llama", "tp=2", False),
    ("gpt", "pp=2", True),
]


def test_two_ranks_compute_together_what_one_process_computes(run_distributed: Any) -> None:
    whole = {
        (kind, activation): of_this_rank([(kind, activation, False)])[0]
        for kind in ("gpt", "llama")
        for activation in ("", "activation=full")
        if (kind, activation) != ("llama", "activation=full")
    }
    assert whole["gpt", ""][0] == FORMULA
    by_rank = run_distributed(of_this_rank, 2, CASES, timeout_s=250)
    for number, (kind, parallel, _) in enumerate(CASES):
        one = whole[kind, "activation=full" if "activation" in parallel else ""]
        for what in (0, 1):
            both = sum(ranks[number][what] for ranks in by_rank)
            assert both == one[what], (kind, parallel, what)


def with_a_folder(folder: str) -> Any:
    accelerator = Accelerator(parallel="ddp", run_dir=folder)
    measures = accelerator.measures

    def is_known() -> bool:
        latest = measures.latest
        return latest is not None and latest.flops is not None and latest.rank_seconds is not None

    # The watch tells rank 0 of the others once a second.
    train(accelerator, steps=100_000, wanted=is_known)
    latest = measures.latest
    assert latest is not None
    return latest.flops, latest.rank_seconds, measures.mfu


def test_rank_0_hears_of_the_others_without_a_collective(tmp_path: Path, run_distributed: Any) -> None:
    (flops, seconds, mfu), (others, _, _) = run_distributed(with_a_folder, 2, str(tmp_path), timeout_s=250)
    assert flops == {"model": FORMULA, "hardware": FORMULA + SCORES_AGAIN}
    assert others is None
    assert len(seconds) == 2 and all(each > 0 for each in seconds)
    assert 0 < mfu < 1
    assert list(read_lines(tmp_path / "measures.jsonl"))[-1]["flops"] == flops
    peaks = [line for line in read_lines(tmp_path / "events.jsonl") if line["event"] == "peak"]
    assert [peak["dtype"] for peak in peaks] == ["fp32"]
