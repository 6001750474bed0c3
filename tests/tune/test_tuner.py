"""Scripts with planted memory, and such that cannot be tuned, on one rank and on two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.tune import CouldNotTune, SizeVerdict, how_to_use, remarks_on, rows, sentence, to_json
from tests.refusals import expect_refusal
from tests.tune.forks import Forks

MIB = 2**20
V = SizeVerdict


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


class Cell(NamedTuple):
    """Words of the script, ranks, and each size that is tried with what comes of it."""

    words: str
    ranks: int
    tried: dict[int, SizeVerdict]


CELLS = [
    Cell("--batch-size 4 --accumulate 4", 1, {4: V.FITS, 8: V.FITS, 16: V.FITS}),
    Cell("--batch-size 16 --is plain --fails memory --above 5", 1,
         {16: V.OUT_OF_MEMORY, 8: V.OUT_OF_MEMORY, 4: V.FITS, 2: V.FITS}),
    Cell("--batch-size 2 --accumulate 8 --is sets_later --fails memory --above 7", 2,
         {2: V.FITS, 4: V.FITS, 8: V.OUT_OF_MEMORY}),
    Cell("--batch-size 4 --accumulate 6 --fails kill --above 9 --rank 1", 2,
         {4: V.FITS, 8: V.FITS, 24: V.KILLED, 12: V.KILLED}),
    Cell("--batch-size 8 --fails kill --above 0", 1,
         {8: V.KILLED, 4: V.KILLED, 2: V.KILLED, 1: V.KILLED}),
    Cell("--batch-size 2 --accumulate 4 --fails raise --above 7", 1, {2: V.FITS, 4: V.FITS, 8: V.FAILED}),
]  # fmt: skip


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.ranks} ranks {cell.words}")
def test_the_largest_that_fits_on_every_rank_is_found(forks: Forks, cell: Cell) -> None:
    result = forks.tune(cell.words.split(), cell.ranks)
    assert {one.micro_batch: one.verdict for one in result.trials} == cell.tried
    fitting = [size for size, verdict in cell.tried.items() if verdict is V.FITS]
    assert (result.largest.micro_batch if result.largest else None) == max(fitting, default=None)
    for one in result.trials:
        assert one.micro_batch * one.accumulation * cell.ranks == result.global_batch
        if one.fits:
            assert all(set(rank.rows) == {result.global_batch} for rank in one.ranks)
            assert all(set(rank.batches) == {one.accumulation} for rank in one.ranks)
            assert one.samples_per_s and one.peak
    if fitting:
        assert result.quickest is not None and result.quickest.fits
        assert "is the same for all sizes" in " ".join(remarks_on(result))
    else:
        assert sentence(result).startswith(
            "No micro-batch fits with a global batch of 8: 1 is too large already."
        )


def test_what_to_write_is_said(forks: Forks) -> None:
    result = forks.tune(["--batch-size", 4, "--accumulate", 2, "--is", "split"], 2)
    best = result.quickest
    assert best is not None
    assert how_to_use(result) == [
        f"DataLoader(..., batch_size={2 * best.micro_batch})",
        f"Accelerator(..., gradient_accumulation_steps={best.accumulation})",
    ]
    report = to_json(result)
    assert report["largest"] == {"micro_batch": 4, "accumulation": 1}
    assert (report["global_batch"], report["script"]) == (8, {"micro_batch": 2, "accumulation": 2})
    assert [row[0] for row in rows(result)] == ["2", "4"]


def test_a_sharded_model_is_tuned(forks: Forks) -> None:
    words = ["--batch-size", 2, "--accumulate", 4, "--fails", "memory", "--above", 4, "--rank", 1]
    result = forks.tune(words, 2, parallel="zero=3")
    verdicts = {one.micro_batch: one.verdict for one in result.trials}
    assert verdicts == {2: V.FITS, 4: V.FITS, 8: V.OUT_OF_MEMORY}
    assert "is the same for all sizes" in " ".join(remarks_on(result))


def test_another_global_batch_is_tuned(forks: Forks) -> None:
    result = forks.tune(["--batch-size", 8], 2, global_batch=24)
    assert result.global_batch == 24
    assert [one.micro_batch for one in result.trials] == [6, 12]
    expect_refusal(CouldNotTune, "25", forks.tune, ["--batch-size", 8], 2, global_batch=25)
    expect_refusal(
        CouldNotTune, "fewer than 32", forks.tune, ["--batch-size", 4, "--samples", 8], global_batch=32
    )


def test_a_rank_ends_itself_at_the_limit(forks: Forks) -> None:
    small = forks.tune(["--batch-size", 1]).trials[0].peak or 0
    result = forks.tune(["--batch-size", 4, "--mib", 40], 2, memory_limit=small + 250 * MIB, steps=3)
    verdicts = {trial.micro_batch: trial.verdict for trial in result.trials}
    assert verdicts == {1: V.FITS, 2: V.FITS, 4: V.OVER_LIMIT}
    assert result.largest is not None and result.largest.micro_batch == 2


@pytest.mark.parametrize(
    ("words", "ranks", "said"),
    [
        ("--is no_loader", 1, "do not come from a loader of accelerator.prepare"),
        ("--is no_step", 1, "ended before it trained on a batch"),
        ("--accumulate 4 --is counts", 2, "makes a step of 4 batches, but asks for 1 accumulation steps"),
        ("--accumulate 4 --is plain", 1, "makes a step of 1 batches, but asks for 4"),
        ("--accumulate 4 --samples 8", 1, "No step of the script has the 4 batches that it accumulates"),
        ("--accumulate 4 --is sum", 2, "The loss is a sum over the rows of a micro-batch"),
        ("--fails raise", 1, "failed as it is: rank 0: ValueError: 4 rows are too many"),
    ],
)
def test_what_cannot_be_tuned_is_said(forks: Forks, words: str, ranks: int, said: str) -> None:
    with pytest.raises(CouldNotTune) as caught:
        forks.tune(words.split(), ranks)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said", "unsaid"),
    [
        (
            "--accumulate 4 --is norm",
            "`1` take the statistics of one micro-batch",
            "is the same for all sizes",
        ),
        ("--accumulate 4 --samples 40", "The last step of an epoch has 8 of 16 rows", "statistics"),
        ("--accumulate 4 --samples 40 --is weighs", "", "The last step of an epoch"),
        (
            "--batch-size 16 --is plain --fails memory --above 8",
            "with accelerator.accumulate(model)",
            "last step",
        ),
    ],
)
def test_what_changes_with_the_size_is_said(forks: Forks, words: str, said: str, unsaid: str) -> None:
    text = " ".join(remarks_on(forks.tune(words.split())))
    assert said in text
    assert unsaid not in text


# The numbers -----------------------------------------------------------------------------------------------


def trained(global_batch: int, samples: int, steps: int) -> list[list[Tensor]]:
    """Weights after each step of plain torch on whole global batches, in the order of the script."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(samples, 8), torch.randn(samples, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=global_batch, shuffle=True)
    after: list[list[Tensor]] = []
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            after.append([value.detach().clone() for value in model.parameters()])
            if len(after) == steps:
                return after


@pytest.mark.parametrize(
    ("ranks", "start"),
    [(1, "--batch-size 16 --fails memory --above 4"), (2, "--batch-size 2 --accumulate 8")],
)
def test_each_size_trains_as_plain_torch_on_the_global_batch(
    forks: Forks, tmp_path: Path, ranks: int, start: str
) -> None:
    # 2 1/4 steps an epoch: the last one is shorter, and with two ranks completed with rows that do not count.
    samples, steps = 36 * ranks, 7
    words = [*start.split(), "--samples", samples, "--is", "weighs", "--dump", tmp_path]
    result = forks.tune(words, ranks, steps=steps)
    fitting = [one.micro_batch for one in result.trials if one.fits]
    assert len(fitting) >= 2
    reference = trained(16 * ranks, samples, steps)
    for size in fitting:
        for number, expected in enumerate(reference, 1):
            found = torch.load(tmp_path / f"{size}-{number}.pt")
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
