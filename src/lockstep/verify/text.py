"""A verdict in one sentence, as a table and as JSON.

Names come from the script, or from a trace that someone else has recorded: whoever prints them escapes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from lockstep.verify.judge.tolerance import SWITCHED
from lockstep.verify.judge.verdict import Fault, Mismatch, ParityVerdict, Ratio, RunFacts
from lockstep.verify.rounding import FEW
from lockstep.verify.trace.items import ItemKind, TraceItem
from lockstep.words import count, of_ranks, percent, seven_digits, two_digits

FORMAT = "lockstep check 1"
MOST_ROWS = 20
TITLES = ("step", "phase", "tensor", "ranks", "found", "distance", "rounding explains", "looks like")
RIGHT = ("step", "distance", "rounding explains")
_MAKE_EQUAL = {
    ItemKind.WEIGHT: "the initial weights: seed the generators before the model is made",
    ItemKind.BATCH: "the data: seed the sampler and what augments it, and read nothing that changes",
    ItemKind.OUTPUT: "this module: seed what it draws, or set torch.use_deterministic_algorithms(True)",
    ItemKind.LOSS: "the loss: seed what it draws, or set torch.use_deterministic_algorithms(True)",
    ItemKind.RATE: "the learning rate: it must not depend on time",
}
_KERNELS = "the kernels: set torch.use_deterministic_algorithms(True)"


def sentence(verdict: ParityVerdict) -> str:
    """Return the answer."""
    facts = verdict.facts
    if verdict.agrees:
        return _agreement(verdict)
    first = verdict.findings[0]
    where = f"step {first.item.step}" if first.fault is Fault.STEP else place(first.item)
    sentences = [f"{where}: {described(first, facts)}.", _before(verdict)]
    if first.looks_like:
        sentences.append(first.looks_like)
    others = len(verdict.findings) - 1
    if others:
        sentences.append(f"{count(others, 'more tensor')} {'differs' if others == 1 else 'differ'}.")
    return " ".join(part for part in sentences if part)


def sentence_of_repeat(verdict: ParityVerdict) -> str:
    """Return the answer where two runs of the reference were compared."""
    if verdict.agrees:
        return f"Two reference runs are equal bit for bit: {count(len(verdict.ratios), 'tensor')}."
    first = verdict.findings[0]
    return (
        f"Two reference runs already differ at {place(first.item)}: {described(first, verdict.facts)}. "
        f"Make the run deterministic, beginning with {_MAKE_EQUAL.get(first.item.kind, _KERNELS)}."
    )


def place(item: TraceItem) -> str:
    """Step 1, backward."""
    return item.kind.phase if not item.step else f"step {item.step}, {item.kind.phase}"


def named(item: TraceItem, facts: RunFacts) -> str:
    """Name an item: the gradient of `blocks.3.weight`."""
    where = [f"call {item.call + 1}"] if item.call else []
    if item.kind.is_of_micro_batch:
        where += [f"micro-batch {item.micro_batch}"] if facts.accumulation_steps > 1 else []
        where += [f"data rank {item.data_rank}"] if item.data_rank >= 0 and facts.data_ranks > 1 else []
    location = f" ({', '.join(where)})" if where else ""
    path = f"[{item.path}]" if item.path else ""
    if not item.name:
        return f"the {item.kind.value}{path}{location}"
    of = " " if item.kind in (ItemKind.BUFFER, ItemKind.WEIGHT) else " of "
    return f"the {item.kind.value}{of}`{item.name}`{path}{location}"


def described(finding: Mismatch, facts: RunFacts) -> str:
    """Say what is wrong, as a clause."""
    if finding.fault is Fault.STEP:
        return f"only the {'candidate' if finding.distance == 0 else 'reference'} made this step"
    ranks = f" on {of_ranks(finding.ranks)}" if set(finding.ranks) != set(finding.holders) else ""
    what = named(finding.item, facts)
    if finding.fault is Fault.MISSING:
        return f"no rank has {what}"
    if finding.fault is Fault.ADDED:
        return f"the reference has nothing like {what} on {of_ranks(finding.ranks)}"
    if finding.fault is Fault.SHAPE:
        found, expected = finding.shapes or ((), ())
        return f"{what}{ranks} has the shape {_shape_text(found)} in place of {_shape_text(expected)}"
    explains = f" (rounding explains {two_digits(finding.spread)})" if finding.spread else ""
    return f"{what}{ranks} {_differs(finding)}{explains}"


def rows(verdict: ParityVerdict, most: int = MOST_ROWS) -> list[tuple[str, ...]]:
    """Return the findings, first the first: cells below ``TITLES``."""
    return [
        (
            str(one.item.step),
            "" if one.fault is Fault.STEP else one.item.kind.phase,
            "" if one.fault is Fault.STEP else named(one.item, verdict.facts).removeprefix("the "),
            _ranks(one),
            _finding_text(one),
            two_digits(one.distance) if one.fault is Fault.DIFFERS else "",
            two_digits(one.spread) if one.fault is Fault.DIFFERS else "",
            one.looks_like,
        )
        for one in verdict.findings[:most]
    ]


def distances(verdict: ParityVerdict) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the steps, and for each phase the largest distance in each step, by what is allowed."""
    largest: dict[str, dict[str, float]] = {}
    steps: dict[str, None] = {}
    for one in verdict.ratios:
        step, phase = f"step {one.item.step}", largest.setdefault(one.item.kind.phase, {})
        steps[step] = None
        phase[step] = max(one.ratio, phase.get(step, 0.0))
    table = [
        (phase, *(two_digits(found[step]) if step in found else "" for step in steps))
        for phase, found in largest.items()
    ]
    return list(steps), table


def remarks(verdict: ParityVerdict) -> list[str]:
    """Sentences below the table."""
    sentences = []
    if len(verdict.findings) > MOST_ROWS:
        sentences.append(f"{count(len(verdict.findings) - MOST_ROWS, 'more tensor')} not listed.")
    if verdict.multiple:
        sentences.append(
            f"Tolerance: {verdict.multiple:g} times the measured rounding error of each tensor "
            f"({verdict.multiple:g} * (1 + {FEW}/n) times if it has n elements)."
        )
    facts = verdict.facts
    if verdict.multiple and facts.dtype != "fp32":
        sentences.append(
            f"In {facts.dtype}, up to {SWITCHED} elements of a tensor may also be on the other side of a kink (a ReLU, "
            "a maximum, the sign of Adam's update)."
        )
    if facts.steps_compared < facts.steps_asked:
        sentences.append(f"{count(facts.steps_compared, 'step')} of {facts.steps_asked} could be compared.")
    return [*sentences, *verdict.notes, *facts.notes]


def to_json(verdict: ParityVerdict) -> dict[str, object]:
    """Return the report as JSON has it; infinite numbers are null.

    Keys:
        format: "lockstep check 1".
        agrees: Whether nothing differs.
        sentence: The answer.
        multiple: Of what rounding explains, that was allowed.
        compared: By kind of tensor, how many were compared.
        agree_before: How many tensors before the first finding agree.
        largest: Of those that agree, the one closest to its limit: ``item``, ``ratio``, ``distance``; or null.
        findings: In the order of the run, each with ``step``, ``phase``, ``kind``, ``name``, ``micro_batch``,
            ``data_rank``, ``call``, ``path``, ``fault`` (differs, missing, added, shape, step), ``ranks``,
            ``holders``, ``distance``, ``rounding_explains``, ``allowed``, ``factor``, ``numbers`` and ``shapes`` (as
            found, as expected), ``looks_like``.
        notes: Sentences on what was not compared.
        run: ``RunFacts``.
    """
    largest = verdict.largest
    return {
        "format": FORMAT,
        "agrees": verdict.agrees,
        "sentence": sentence(verdict),
        "multiple": verdict.multiple,
        "compared": {kind.value: number for kind, number in verdict.compared.items()},
        "agree_before": verdict.agree_before,
        "largest": None if largest is None else _ratio(largest),
        "findings": [_finding(one) for one in verdict.findings],
        "notes": remarks(verdict),
        "run": asdict(verdict.facts),
    }


def _agreement(verdict: ParityVerdict) -> str:
    facts, largest = verdict.facts, verdict.largest
    with_ = f" with {facts.candidate}" if facts.candidate else ""
    of = f"{count(facts.nproc, 'rank')} with {facts.reference}" if facts.reference else "one process"
    number = len(verdict.ratios)
    if not number:
        return "Nothing was compared: the two runs have no tensor in common."
    steps = facts.steps_compared or len({one.item.step for one in verdict.ratios if one.item.step})
    most = "."
    if largest is not None and largest.ratio > 0:
        what = f"{place(largest.item)}: {named(largest.item, facts)}"
        most = f". The largest difference ({what}) is {percent(largest.ratio)} of the tolerance."
    elif largest is not None:
        most = " bit for bit."
    return (
        f"OK: {count(facts.nproc, 'rank')}{with_} {'matches' if facts.nproc == 1 else 'match'} {of}: "
        f"{count(number, 'tensor')} of {count(steps, 'step')} {'agrees' if number == 1 else 'agree'}{most}"
    )


def _before(verdict: ParityVerdict) -> str:
    return "Everything before it agrees." if verdict.agree_before else "Nothing was compared before it."


def _differs(finding: Mismatch) -> str:
    if finding.item.kind is ItemKind.BATCH:
        return "has other rows"
    if finding.numbers is not None and finding.factor is None:
        found, expected = finding.numbers
        return f"is {seven_digits(found)} in place of {seven_digits(expected)}"
    if finding.factor is not None:
        numbers = ""
        if finding.numbers is not None:
            numbers = f" ({seven_digits(finding.numbers[0])} in place of {seven_digits(finding.numbers[1])})"
        return f"is {_times(finding.factor)}{numbers}"
    if not math.isfinite(finding.distance):
        return "is NaN, infinite or not zero where the reference is not"
    return f"is off by {two_digits(finding.distance)} of its norm"


def _times(factor: float) -> str:
    if factor == 0:
        return "zero"
    digits = f"{factor:.2f}" if 0.1 <= abs(factor) < 1000 else f"{factor:.3g}"
    if abs(float(digits) - 1) < 0.005:
        digits = f"{factor:.6g}"
    return f"{digits} times the reference"


def _finding_text(finding: Mismatch) -> str:
    if finding.fault is Fault.DIFFERS:
        return _differs(finding).removeprefix("is ").removeprefix("has ")
    if finding.fault is Fault.SHAPE and finding.shapes:
        return f"shape {_shape_text(finding.shapes[0])}, not {_shape_text(finding.shapes[1])}"
    if finding.fault is Fault.STEP:
        return "in the candidate alone" if finding.distance == 0 else "in the reference alone"
    return "on no rank" if finding.fault is Fault.MISSING else "not in the reference"


def _ranks(finding: Mismatch) -> str:
    if finding.ranks and set(finding.ranks) == set(finding.holders) and len(finding.ranks) > 1:
        return "all"
    return of_ranks(finding.ranks).removeprefix("ranks ").removeprefix("rank ") if finding.ranks else ""


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _finding(finding: Mismatch) -> dict[str, object]:
    return {
        **_item(finding.item),
        "fault": finding.fault.value,
        "ranks": list(finding.ranks),
        "holders": list(finding.holders),
        "distance": _finite(finding.distance),
        "rounding_explains": _finite(finding.spread),
        "allowed": _finite(finding.allowed),
        "factor": finding.factor,
        "numbers": None if finding.numbers is None else [_finite(one) for one in finding.numbers],
        "shapes": None if finding.shapes is None else [list(one) for one in finding.shapes],
        "looks_like": finding.looks_like,
    }


def _ratio(ratio: Ratio) -> dict[str, object]:
    return {"item": _item(ratio.item), "ratio": _finite(ratio.ratio), "distance": _finite(ratio.distance)}


def _item(item: TraceItem) -> dict[str, object]:
    return {**item._asdict(), "kind": item.kind.value, "phase": item.kind.phase}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
