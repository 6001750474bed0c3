"""The answer, as a sentence, a table, and JSON."""

from __future__ import annotations

from dataclasses import asdict

from lockstep.tune.remarks import remarks_on
from lockstep.tune.trial import SizeTrial, SizeVerdict
from lockstep.tune.tuner import TuneResult
from lockstep.words import memory_text

TITLES = ("micro-batch", "accumulation", "samples/s", "tokens/s", "peak of a rank", "verdict")
RIGHT = TITLES[:-1]


def rows(result: TuneResult) -> list[tuple[str, ...]]:
    """Return one for each size, ascending."""
    return [
        (
            str(one.micro_batch),
            str(one.accumulation),
            _rate(one.samples_per_s),
            _rate(one.tokens_per_s),
            "" if one.peak is None else memory_text(one.peak),
            verdict(one, result.limit),
        )
        for one in result.trials
    ]


def verdict(trial: SizeTrial, limit: int | None) -> str:
    """Say the verdict in words."""
    of = "" if limit is None else f" of {memory_text(limit)}"
    match trial.verdict:
        case SizeVerdict.FITS:
            return "fits"
        case SizeVerdict.OVER_LIMIT:
            return f"does not fit: over the limit{of}"
        case SizeVerdict.TOO_SLOW | SizeVerdict.FAILED:
            return f"{trial.verdict.value}: {trial.why}"
        case _:
            return f"does not fit: {trial.why}"


def sentence(result: TuneResult) -> str:
    """Return what to take."""
    largest, quickest = result.largest, result.quickest
    batch = f"with a global batch of {result.global_batch}"
    if largest is None:
        tried = result.trials[0].micro_batch
        of = "" if result.limit is None else f" of {memory_text(result.limit)} for each rank"
        return f"No micro-batch fits {batch}: {tried} is too large already. Shard the model, or raise the limit{of}."
    text = f"The largest micro-batch that fits {batch} is {_size(largest)}"
    if quickest is None:
        return f"{text}."
    if quickest is largest:
        return (
            f"{text}; it is the quickest too, with {_rate(quickest.samples_per_s)} samples/s{_gain(result)}."
        )
    return f"{text}; the quickest is {_size(quickest)}, with {_rate(quickest.samples_per_s)} samples/s{_gain(result)}."


def how_to_use(result: TuneResult) -> list[str]:
    """Return the lines to write for the quickest size."""
    best, facts = result.quickest or result.largest, result.script
    if best is None:
        return []
    if facts.is_trainer:
        return [
            f"TrainingArguments(per_device_train_batch_size={best.micro_batch}, "
            f"gradient_accumulation_steps={best.accumulation})"
        ]
    size = best.micro_batch * (facts.data_ranks if facts.split_batches else 1)
    return [
        f"DataLoader(..., batch_size={size})",
        f"Accelerator(..., gradient_accumulation_steps={best.accumulation})",
    ]


def to_json(result: TuneResult) -> dict[str, object]:
    """Return the same for programs. Sizes are rows of a rank, memory is in bytes."""
    trials = []
    for one in result.trials:
        fields = asdict(one)
        del fields["ranks"]
        trials.append(
            {**fields, "verdict": one.verdict.value, "peak_by_rank": {r.rank: r.peak for r in one.ranks}}
        )
    return {
        "format": "lockstep tune 1",
        "sentence": sentence(result),
        "global_batch": result.global_batch,
        "data_ranks": result.script.data_ranks,
        "script": _chosen_sizes(*result.own),
        "largest": None if result.largest is None else _sizes_of(result.largest),
        "quickest": None if result.quickest is None else _sizes_of(result.quickest),
        "limit": result.limit,
        "use": how_to_use(result),
        "remarks": remarks_on(result),
        "trials": trials,
    }


def _sizes_of(trial: SizeTrial) -> dict[str, int]:
    return _chosen_sizes(trial.micro_batch, trial.accumulation)


def _chosen_sizes(micro_batch: int, accumulation: int) -> dict[str, int]:
    return {"micro_batch": micro_batch, "accumulation": accumulation}


def _size(trial: SizeTrial) -> str:
    steps = trial.accumulation
    return f"{trial.micro_batch} (times {steps} accumulation step{'' if steps == 1 else 's'})"


def _gain(result: TuneResult) -> str:
    own, best = result.as_it_is, result.quickest
    if own is None or best is None or own is best or not own.samples_per_s or not best.samples_per_s:
        return ""
    return f", {best.samples_per_s / own.samples_per_s:.2f} times those of the script's own {own.micro_batch}"


def _rate(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
