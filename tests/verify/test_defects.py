"""Defects that were reported of engines for many ranks, each planted in a run: the first finding names where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.verify import CheckedProgram, ItemKind, ParityVerdict, Request
from tests.verify.forks import ForkedCheck, ForkServer

SCRIPT = Path(__file__).parent / "defects" / "training.py"
EVERY_GRADIENT = "head.bias|head.weight"
"""The first of all gradients, in the order of backward."""


class Row(NamedTuple):
    """A defect, where it is planted, and what the first finding must be.

    Attributes:
        defect: Its name in ``defects/planted.py``.
        names: Of tensors, as a pattern.
        looks_like: A part of what is said.
    """

    defect: str
    model: str
    parallel: str
    nproc: int
    step: int
    kind: ItemKind
    names: str
    looks_like: str = ""


K = ItemKind
ROWS = [
    # Gradients of replicas: not reduced, or by another factor.
    Row("gradients_not_reduced", "net", "ddp", 2, 1, K.GRADIENT, EVERY_GRADIENT, "not averaged"),
    Row("gradients_of_the_step_before", "net", "ddp", 2, 2, K.GRADIENT, EVERY_GRADIENT, "step before"),
    # Accumulation, the scale of the loss, weights.
    Row("losses_not_divided_by_the_accumulation_steps", "net", "ddp", 2, 1, K.OUTPUT_GRADIENT, "head|"),
    Row("gradients_not_set_to_zero", "net", "ddp", 2, 2, K.GRADIENT, EVERY_GRADIENT),
    # Shards.
    Row("shards_swapped", "net", "zero=3", 2, 1, K.GRADIENT, EVERY_GRADIENT),
    Row("weights_gathered_before_the_step", "net", "zero=3", 2, 2, K.OUTPUT, "enter"),
    Row("norm_of_one_shard", "net", "zero=3", 2, 1, K.NORM, ""),
    # The optimizer and its rate.
    Row("scheduler_steps_twice", "net", "ddp", 2, 2, K.RATE, ""),
    Row("step_skipped_on_one_rank", "net", "ddp", 2, 2, K.BATCH, "", "step was skipped on rank 1"),
    # Data, seeds, buffers.
    Row("other_weights_on_one_rank", "net", "ddp", 2, 1, K.OUTPUT, "inner"),
    Row("another_mask_of_dropout", "net", "ddp", 2, 1, K.OUTPUT, "drop"),
    # Models that are split.
    Row(
        "gradients_of_columns_not_summed", "tied", "tp=2", 2, 1, K.OUTPUT_GRADIENT, "model.norm", "not summed"
    ),
    Row("tied_gradient_lost", "tied", "pp=2", 2, 1, K.GRADIENT, "model.embed_tokens.weight", "not summed"),
    Row(
        "loss_of_own_positions_alone",
        "tied",
        "cp=2",
        2,
        1,
        K.OUTPUT_GRADIENT,
        "model.layers.1",
        "ranks of cp",
    ),
    # Experts.
    Row("gradients_of_experts_summed", "experts", "ep=2", 2, 1, K.GRADIENT, "mixture.experts.bias_out"),
]
OF_ONE_BATCH = re.compile(r"\b(tp|pp|cp)=2")


class Checks:
    """Checks of the script, whose references are made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = ForkServer(["transformers.models.llama.modeling_llama"])
        self._number = 0

    def verdict(self, row: Row) -> ParityVerdict:
        """On a run with the defect."""
        data_ranks = 1 if OF_ONE_BATCH.search(row.parallel) else row.nproc
        trace = self._folder / f"{row.model}-{data_ranks}.trace"
        if not trace.exists():
            assert self._check(row, (row.model,), record=trace).agrees
        return self._check(row, (row.model, row.defect), against=trace)

    def _check(
        self, row: Row, words: tuple[str, ...], record: Path | None = None, against: Path | None = None
    ) -> ParityVerdict:
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        request = Request(
            CheckedProgram((str(SCRIPT), *words)),
            folder,
            nproc=row.nproc,
            parallel=row.parallel,
            # Experts of all ranks route their batches together.
            reference="ddp" if row.model == "experts" and record is not None else None,
            record=record,
            against=against,
            timeout_s=100,
        )
        return ForkedCheck(request, self._server).verdict()

    def close(self) -> None:
        """End what makes the runs."""
        self._server.close()


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checks]:
    made = Checks(tmp_path_factory.mktemp("defects"))
    yield made
    made.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_first_finding_names_the_tensor_the_step_and_the_direction(row: Row, checks: Checks) -> None:
    verdict = checks.verdict(row)
    assert verdict.findings, f"{row.defect} was not found"
    first = verdict.findings[0]
    assert (first.item.step, first.item.kind) == (row.step, row.kind), first
    assert re.fullmatch(row.names, first.item.name), first
    assert row.looks_like in first.looks_like, first


def test_every_planted_defect_has_a_row() -> None:
    source = (SCRIPT.parent / "planted.py").read_text("utf-8")
    planted = re.findall(r"^@defect\ndef (\w+)|^DEFECTS\[\"(\w+)\"\]", source, re.MULTILINE)
    assert sorted({row.defect for row in ROWS}) == sorted(one or other for one, other in planted)
