"""`check_parity`: models that are trained alike, planted defects that are named, and what cannot be checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.nn import load_balance_loss
from lockstep.observe import RunObserver
from lockstep.testing import (
    CouldNotRun,
    ParityError,
    ParityReport,
    ParityWorkers,
    check_parity,
    compare_parity,
)
from lockstep.verify import ItemKind
from tests.refusals import expect_refusal
from tests.testing import defects
from tests.testing.models import MODELS, balanced, cnn, mlp, moving_scale, of_loader

pytest_plugins = ["lockstep.testing.fixtures"]

CELLS = [
    ("mlp", "ddp"),
    ("cnn", "zero=3"),
    ("lstm", "zero=2"),
    ("llama", "zero=3"),
    ("llama", "cp=2"),
    ("mixtral", "tp=2"),
    ("t5", "pp=2"),
    ("mlp_adafactor", "zero=3"),  # it steps on whole parameters
]
"""Each model, and each strategy, at least once."""


@pytest.mark.parametrize(("model", "words"), CELLS)
def test_a_model_is_trained_alike(parity_workers: ParityWorkers, model: str, words: str) -> None:
    report = parity_workers.compare_parity(MODELS[model], parallel=words, steps=2, max_grad_norm=1.0)
    assert report.agrees, str(report)
    compared = report.verdict.compared
    assert all(compared[kind] for kind in ItemKind if kind is not ItemKind.BUFFER)
    assert report.verdict.facts.steps_compared == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"mixed_precision": "bf16"},
        {"reference": "zero=1", "parallel": "zero=3"},
        {"nproc": 4, "parallel": "zero=2 tp=2", "steps": 1},
    ],
    ids=str,
)
def test_settings_of_a_run(check_parity: Callable[..., ParityReport], settings: dict[str, object]) -> None:
    report = check_parity(mlp, **{"steps": 2, **settings})
    facts = report.verdict.facts
    assert facts.nproc == settings.get("nproc", 2)
    assert facts.accumulation_steps == settings.get("gradient_accumulation_steps", 1)
    assert facts.dtype == settings.get("mixed_precision", "fp32")
    assert facts.reference == settings.get("reference", "")


@pytest.mark.parametrize(("parallel", "accumulation"), [("ddp", 2), ("zero=3", 1)])
def test_each_rank_has_buffers_of_its_own(
    parity_workers: ParityWorkers, parallel: str, accumulation: int
) -> None:
    """Ranks take those of rank 0 before the first micro-batch of a step, and use them in forward."""
    report = parity_workers.compare_parity(
        moving_scale, parallel=parallel, gradient_accumulation_steps=accumulation, steps=2
    )
    assert report.agrees, str(report)
    buffers = {one.item.name for one in report.verdict.ratios if one.item.kind is ItemKind.BUFFER}
    assert {"1.scale", "2.num_batches_tracked"} <= buffers


# name of the defect -> the first tensor that differs: its kind, its name, and what is said of it
PLANTED: dict[Callable[[], object], tuple[ItemKind, str, str]] = {
    defects.gradient_times_ranks: (ItemKind.OUTPUT_GRADIENT, "1", "2.00 times the reference"),
    defects.rate_times_ranks: (ItemKind.RATE, "", "2.00 times the reference"),
    defects.batch_read_twice: (ItemKind.BATCH, "", "samples were read twice"),
}


@pytest.mark.parametrize("make", PLANTED, ids=lambda make: make.__name__)
def test_a_planted_defect_is_named(parity_workers: ParityWorkers, make: Callable[[], object]) -> None:
    kind, name, said = PLANTED[make]
    with pytest.raises(ParityError) as raised:
        parity_workers.check_parity(make, steps=2)
    report = raised.value.report
    assert (report.findings[0].item.kind, report.findings[0].item.name) == (kind, name)
    assert said in report.sentence
    assert str(raised.value) == str(report)
    assert report.sentence in str(report)


def test_a_defect_is_returned_by_the_one_and_raised_by_the_other(parity_workers: ParityWorkers) -> None:
    report = parity_workers.compare_parity(defects.rate_times_ranks, steps=1)
    assert not report.agrees
    expect_refusal(ParityError, "learning rate", report.raise_if_differs)
    assert isinstance(ParityError(report), AssertionError)
    assert report.to_json()["sentence"] == report.sentence


def test_the_functions_start_processes_of_their_own() -> None:
    assert check_parity(mlp, steps=1).agrees
    assert not compare_parity(defects.rate_times_ranks, steps=1).agrees


def local() -> Callable[[], object]:
    def make() -> object:
        return mlp()

    return make


REFUSED: list[tuple[object, dict[str, object], type[LockstepError], str]] = [
    (local(), {}, UsageError, "make cannot be pickled .* Define it with def at the top level of a module"),
    (mlp(), {}, UsageError, r"make is a tuple, but must be a function .* Pass the function itself"),
    (mlp, {"steps": 0}, ConfigError, "steps=0 .* at least 1|steps.* from 1 to"),
    (mlp, {"nproc": 2.5}, ConfigError, "nproc"),
    (mlp, {"nproc": 3, "parallel": "tp=2"}, ConfigError, r"3 / 2 is not whole"),
    (mlp, {"parallel": "zero3"}, ConfigError, "Did you mean 'zero=3'"),
    (mlp, {"max_grad_norm": -1.0}, ConfigError, "max_grad_norm is -1.0, but must be a positive number"),
    (mlp, {"reference": "tp=2"}, ConfigError, "trains on 2 batches at a time, but reference='tp=2' on 1"),
    (
        mlp,
        {"steps": 5},
        UsageError,
        "has 8 batches, but 5 steps take 10, as 2 ranks have batches of their own",
    ),
    (
        mlp,
        {"gradient_accumulation_steps": 2},
        UsageError,
        "has 8 batches, but 3 steps x 2 micro-batches take 12",
    ),
    (
        defects.three_values,
        {},
        UsageError,
        "has returned 3 values. It has to return model, optimizer, batches and",
    ),
    (defects.batches_as_an_iterator, {}, UsageError, "The batches .* is a list_iterator, but must be a list"),
    (
        defects.loss_as_a_number,
        {},
        UsageError,
        "The loss .* a value of type float, but must return a 0-d tensor",
    ),
    (defects.loss_of_rows, {}, UsageError, r"a tensor of shape \[4\] and torch.float32"),
    (
        defects.tuples_without_loss,
        {},
        UsageError,
        r"model\(\*\*batch\).loss, but a batch is a (tuple|list)",
    ),
    (defects.short_stream, {}, UsageError, "end after 1 of 3 steps on 2 ranks"),
]


@pytest.mark.parametrize(
    ("make", "settings", "error", "sentence"),
    REFUSED,
    ids=lambda value: getattr(value, "__name__", str(value))[:40],
)
def test_bad_input_is_refused(
    parity_workers: ParityWorkers,
    make: Callable[[], object],
    settings: dict[str, object],
    error: type[LockstepError],
    sentence: str,
) -> None:
    with pytest.raises(error, match=sentence):
        parity_workers.compare_parity(make, **settings)  # type: ignore[arg-type]


def test_batches_of_a_shuffled_loader(parity_workers: ParityWorkers) -> None:
    assert parity_workers.check_parity(partial(of_loader, 2), parallel="zero=2").agrees


def test_nothing_is_left_in_a_process(parity_workers: ParityWorkers) -> None:
    before = parity_workers._pool.run(what_is_changed, 2)
    parity_workers.check_parity(mlp, steps=1)
    with pytest.raises(UsageError):
        parity_workers.check_parity(defects.loss_as_a_number, steps=1)
    assert parity_workers._pool.run(what_is_changed, 2) == before


def what_is_changed() -> tuple[int, str, bool]:
    return len(RunObserver.registered), torch.Tensor.backward.__module__, torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            defects.fails_on_rank_1,
            ("candidate failed first on rank 1", "planted in make", "defects.py"),
        ),
        (defects.fails_everywhere, ("reference failed first on rank 0", "planted everywhere")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_failure_comes_back_with_its_rank(
    parity_workers: ParityWorkers, make: Callable[[], object], said: tuple[str, ...]
) -> None:
    with pytest.raises(CouldNotRun) as raised:
        parity_workers.compare_parity(make)
    assert all(one in str(raised.value) for one in (*said, "Traceback")), str(raised.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            defects.other_weights_each_time,
            "the initial weight `0.bias`",
        ),
        (defects.unseeded_data, "the batch"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_repeat_is_no_failure_of_parity(
    parity_workers: ParityWorkers, make: Callable[[], object], said: str
) -> None:
    with pytest.raises(CouldNotRun, match="already differ") as raised:
        parity_workers.compare_parity(make)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("make", "parallel", "said"),
    [
        (partial(balanced, load_balance_loss), "ep=2", "`experts` is a MixtureOfExperts"),
        (cnn, "zero=1 sync_batchnorm", "With sync_batchnorm `1` takes its statistics"),
    ],
    ids=["balance", "sync_batchnorm"],
)
def test_what_needs_all_batches_at_once_has_several_processes_as_its_reference(
    parity_workers: ParityWorkers, make: Callable[[], object], parallel: str, said: str
) -> None:
    with pytest.raises(CouldNotRun) as raised:
        parity_workers.compare_parity(make, parallel=parallel, steps=1)
    why, _, reference = str(raised.value).partition("Compare with several processes instead: --reference ")
    assert said in why
    assert "Traceback" not in why
    reference = reference.rstrip(".").strip('"')
    assert parity_workers.compare_parity(make, parallel=parallel, steps=1, reference=reference).agrees


def test_a_report_asks_whether_the_script_draws_from_a_generator_of_its_own(
    parity_workers: ParityWorkers,
) -> None:
    make = defects.noise_of_torch
    report = parity_workers.compare_parity(make, steps=1)
    assert not report.agrees and "draw from a generator of its own with each batch?" in str(report)
    assert parity_workers.compare_parity(make, steps=1, reference="ddp", parallel="zero=1").agrees


def test_a_generator_that_is_seeded_with_each_batch_has_the_same_numbers(
    parity_workers: ParityWorkers,
) -> None:
    assert parity_workers.compare_parity(partial(defects.noise_of_torch, seeds=True), steps=2).agrees


def test_a_hung_rank_is_ended_and_named() -> None:
    with ParityWorkers() as workers:
        assert workers.compare_parity(mlp, steps=1).agrees  # starts them
        workers.timeout_s = 6
        with pytest.raises(CouldNotRun) as raised:
            workers.compare_parity(defects.hangs_on_rank_1)
        assert "The candidate did not end within 6 s" in str(raised.value)
        assert "named_sleep" in str(raised.value)
        assert "Behind the others: rank 1. Compared last by rank 0: step 1, backward" in str(raised.value)
        workers.timeout_s = 120
        assert workers.compare_parity(mlp, steps=1).agrees
