"""Defects that were reported of engines for many ranks, each planted in a run: the first finding names where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.parity import CheckedProgram, Request
from lockstep.parity.judge import ParityVerdict
from lockstep.parity.trace import ItemKind
from tests.marks import again_if
from tests.parity.forks import ForkedCheck, ForkServer

SCRIPT = Path(__file__).parent / "defects" / "training.py"
EVERY_GRADIENT = "head.bias|head.weight"
"""The first of all gradients, in the order of backward."""
FEEDBACK = "model.layers.1.post_attention_layernorm"


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
    Row("gradients_summed", "net", "ddp", 2, 1, K.GRADIENT, EVERY_GRADIENT, "summed over 2 ranks"),
    Row("gradients_divided_twice", "net", "ddp", 2, 1, K.GRADIENT, EVERY_GRADIENT, "divided by the 2 ranks"),
    Row("gradients_of_half_the_ranks", "net", "ddp", 4, 1, K.GRADIENT, EVERY_GRADIENT, "2 of 4 ranks"),
    Row("one_parameter_not_reduced", "net", "ddp", 2, 1, K.GRADIENT, "enter.weight", "not averaged"),
    Row("gradients_reduced_in_bf16", "net", "ddp", 2, 1, K.GRADIENT, EVERY_GRADIENT),
    Row(
        "first_ranks_gradients_broadcast",
        "net",
        "ddp",
        2,
        1,
        K.GRADIENT,
        EVERY_GRADIENT,
        "It is that of rank 0's batches alone",
    ),
    Row("one_rank_adds_nothing", "net", "ddp", 2, 1, K.GRADIENT, EVERY_GRADIENT, "rank 1 added nothing"),
    Row("gradients_of_two_ranks", "net", "ddp", 4, 1, K.GRADIENT, EVERY_GRADIENT, "over 2 of 4 ranks"),
    Row("two_gradients_of_a_bucket_swapped", "net", "ddp", 2, 1, K.GRADIENT, "other.weight", "were swapped"),
    Row("gradients_of_the_step_before", "net", "ddp", 2, 2, K.GRADIENT, EVERY_GRADIENT, "step before"),
    # Accumulation, the scale of the loss, weights.
    Row("losses_not_divided_by_the_accumulation_steps", "net", "ddp", 2, 1, K.OUTPUT_GRADIENT, "head|"),
    Row("one_micro_batch_too_few", "net", "ddp", 2, 1, K.GRADIENT, EVERY_GRADIENT),
    Row("gradients_not_set_to_zero", "net", "ddp", 2, 2, K.GRADIENT, EVERY_GRADIENT, "not set to zero"),
    Row("scale_of_the_loss_left_in", "net", "ddp", 2, 1, K.GRADIENT, EVERY_GRADIENT, "scale of the loss"),
    Row("stale_scale_of_the_loss", "net", "ddp", 2, 2, K.GRADIENT, EVERY_GRADIENT),
    Row("gradients_zero_on_one_rank", "net", "ddp", 2, 2, K.GRADIENT, EVERY_GRADIENT, "zero on rank 1"),
    Row("weight_decay_in_the_gradient", "net", "ddp", 2, 1, K.GRADIENT, EVERY_GRADIENT, "weight decay"),
    Row("weights_of_losses_not_summed", "weighted", "ddp", 2, 1, K.GRADIENT, EVERY_GRADIENT),
    # Shards.
    Row("shards_not_reduced", "net", "zero=3", 2, 1, K.GRADIENT, EVERY_GRADIENT, "its own batches alone"),
    Row("shards_summed", "net", "zero=2", 2, 1, K.GRADIENT, EVERY_GRADIENT, "summed over 2 ranks"),
    Row("shards_divided_twice", "net", "zero=1", 2, 1, K.GRADIENT, EVERY_GRADIENT, "divided by the 2 ranks"),
    Row("shards_swapped", "net", "zero=3", 2, 1, K.GRADIENT, EVERY_GRADIENT),
    Row("shards_reduced_in_bf16", "net", "zero=3", 2, 1, K.GRADIENT, EVERY_GRADIENT),
    Row(
        "replicas_not_reduced", "net", "zero=3 replicate=2", 4, 1, K.GRADIENT, EVERY_GRADIENT, "not averaged"
    ),
    Row("weights_gathered_before_the_step", "net", "zero=3", 2, 2, K.OUTPUT, "enter"),
    Row("norm_of_one_shard", "net", "zero=3", 2, 1, K.NORM, "", "local norms of 2 ranks"),
    Row("not_clipped_on_one_rank", "net", "ddp", 2, 1, K.CLIPPED, EVERY_GRADIENT, "not clipped"),
    # The optimizer and its rate.
    Row("scheduler_steps_twice", "net", "ddp", 2, 2, K.RATE, "", "a step ahead"),
    Row("rate_times_ranks", "net", "ddp", 2, 1, K.RATE, "", "scaled by the 2 ranks"),
    Row("states_swapped", "net", "ddp", 2, 2, K.UPDATE, "inner.weight|other.weight"),
    Row("step_undone_on_one_rank", "net", "ddp", 2, 2, K.UPDATE, "enter.weight", "zero on rank 1"),
    Row("step_skipped_on_one_rank", "net", "ddp", 2, 2, K.BATCH, "", "step was skipped on rank 1"),
    Row("no_weight_decay_on_one_rank", "net", "ddp", 2, 1, K.UPDATE, "enter.weight", "weight decay"),
    Row("update_of_another_rank_missing", "net", "ddp", 2, 1, K.UPDATE, "head.weight", "zero on rank 0"),
    Row("states_in_bf16", "net", "ddp", 2, 2, K.UPDATE, "enter.weight"),
    Row("weights_in_bf16", "net", "ddp", 2, 1, K.UPDATE, "enter.weight"),
    # Data, seeds, buffers.
    Row("sample_read_twice", "net", "ddp", 2, 1, K.BATCH, "", "more than once"),
    Row("batch_read_by_two_ranks", "net", "ddp", 2, 1, K.BATCH, "", "read twice"),
    Row("rows_in_another_order", "net", "ddp", 2, 1, K.BATCH, "", "another order"),
    Row("batch_read_again", "net", "ddp", 2, 3, K.BATCH, "", "read twice"),
    Row("other_weights_on_one_rank", "net", "ddp", 2, 0, K.WEIGHT, "inner.weight", "rank 1 was left out"),
    Row("other_weights_than_with_one_rank", "net", "ddp", 2, 0, K.WEIGHT, "enter.weight"),
    Row("another_mask_of_dropout", "net", "ddp", 2, 1, K.OUTPUT, "drop"),
    Row("no_dropout_on_one_rank", "net", "ddp", 2, 1, K.OUTPUT, "drop"),
    Row("statistics_averaged_over_ranks", "net", "ddp", 2, 1, K.BUFFER, "batch_norm.running_mean"),
    Row("statistics_in_bf16", "net", "ddp", 2, 1, K.BUFFER, "batch_norm.running_var", "rounded to bf16"),
    Row("statistics_of_one_rank_rounded", "net", "ddp", 2, 1, K.BUFFER, "batch_norm.running_var", "to bf16"),
    Row("statistics_never_broadcast", "net", "ddp", 2, 2, K.BUFFER, "batch_norm.running_mean"),
    Row("statistics_never_broadcast", "net", "zero=2", 2, 1, K.BUFFER, "batch_norm.running_mean"),
    Row(
        "statistics_of_the_first_rank_at_each_step",
        "net",
        "zero=3",
        2,
        1,
        K.BUFFER,
        "batch_norm.running_mean",
        "data rank 0",
    ),
    Row("statistics_counted_twice", "net", "ddp", 2, 1, K.BUFFER, "batch_norm.running_mean"),
    Row(
        "recomputed_with_another_mask",
        "dropout",
        "ddp activation=full",
        2,
        1,
        K.OUTPUT_GRADIENT,
        r"model\.layers\.\d\..*",
    ),
    # Models that are split.
    Row("parts_of_rows_not_summed", "llama", "tp=2", 2, 1, K.OUTPUT, "model.embed_tokens", "not summed"),
    Row(
        "gradients_of_columns_not_summed",
        "llama",
        "tp=2",
        2,
        1,
        K.OUTPUT_GRADIENT,
        "model.norm",
        "not summed",
    ),
    Row(
        "gradients_of_rows_summed_again",
        "llama",
        "tp=2",
        2,
        1,
        K.OUTPUT_GRADIENT,
        r"model.layers.1.mlp.(up_proj|gate_proj|act_fn)",
        "2 ranks of tp",
    ),
    Row(
        "gradients_of_norms_not_summed",
        "llama",
        "tp=2 sequence_parallel",
        2,
        1,
        K.GRADIENT,
        f"{FEEDBACK}.weight",
        "not summed",
    ),
    Row(
        "gradients_of_the_sequence_not_summed",
        "llama",
        "tp=2 sequence_parallel",
        2,
        1,
        K.OUTPUT_GRADIENT,
        FEEDBACK,
    ),
    Row("tied_gradient_lost", "tied", "pp=2", 2, 1, K.GRADIENT, "model.embed_tokens.weight", "not summed"),
    Row(
        "tied_gradient_doubled", "tied", "pp=2", 2, 1, K.GRADIENT, "model.embed_tokens.weight", "ranks of pp"
    ),
    Row("micro_batches_of_stages_summed", "tied", "pp=2", 2, 1, K.GRADIENT, "model.norm.weight"),
    Row(
        "gradients_of_positions_not_averaged",
        "llama",
        "cp=2",
        2,
        1,
        K.GRADIENT,
        f"{FEEDBACK}.weight",
        "averaged",
    ),
    Row(
        "loss_of_own_positions_alone",
        "llama",
        "cp=2",
        2,
        1,
        K.OUTPUT_GRADIENT,
        "model.layers.1",
        "ranks of cp",
    ),
    Row("positions_of_the_first_rank", "llama", "cp=2", 2, 1, K.OUTPUT, "model.layers.0.self_attn(.o_proj)?"),
    Row(
        "gradients_of_values_doubled",
        "llama",
        "cp=2",
        2,
        1,
        K.OUTPUT_GRADIENT,
        "model.layers.1.self_attn.v_proj",
    ),
    # Experts.
    Row("gradients_of_experts_summed", "experts", "ep=2", 2, 1, K.GRADIENT, "mixture.experts.bias_out"),
    Row("gradient_of_the_balance_loss_not_summed", "experts", "ep=2", 2, 1, K.OUTPUT_GRADIENT, "embed"),
    Row("gradients_of_the_router_not_averaged", "experts", "ep=2", 2, 1, K.GRADIENT, "mixture.router.weight"),
    Row("tokens_at_other_experts", "experts", "ep=2", 2, 1, K.OUTPUT, "mixture"),
]
FAST = {
    "gradients_summed",
    "gradients_of_the_step_before",
    "two_gradients_of_a_bucket_swapped",
    "gradients_not_reduced",
    "losses_not_divided_by_the_accumulation_steps",
    "gradients_not_set_to_zero",
    "gradients_zero_on_one_rank",
    "shards_not_reduced",
    "shards_swapped",
    "shards_reduced_in_bf16",
    "weights_gathered_before_the_step",
    "norm_of_one_shard",
    "scheduler_steps_twice",
    "states_swapped",
    "step_skipped_on_one_rank",
    "sample_read_twice",
    "other_weights_on_one_rank",
    "another_mask_of_dropout",
    "statistics_in_bf16",
    "statistics_of_one_rank_rounded",
    "gradients_of_experts_summed",
    "tokens_at_other_experts",
}
"""The others prove the same of further strategies and tensors."""
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
        # Ranks take the buffers of rank 0 before other micro-batches with ZeRO.
        trace = self._folder / f"{row.model}-{data_ranks}-{'zero' in row.parallel}.trace"
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


@pytest.mark.parametrize(
    "row", again_if(ROWS, [row for row in ROWS if row.defect not in FAST]), ids=lambda row: row[0]
)
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
