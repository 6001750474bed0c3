"""Whether two runs agree: what all ranks have measured, put together and held against what rounding explains."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lockstep.verify.judge.kinks import Kinks, are_switched
from lockstep.verify.judge.patterns import Case, RankPart, recognise
from lockstep.verify.judge.tolerance import Tolerance
from lockstep.verify.judge.verdict import Fault, Mismatch, ParityVerdict, Ratio, RunFacts
from lockstep.verify.trace.file import Trace
from lockstep.verify.trace.items import ItemKind, TraceItem
from lockstep.verify.trace.measure import DistanceSums, Limit, Measured
from lockstep.words import count, of_ranks

EXAMINED = 20
"""Findings, in order, that are looked at for what they look like."""
NOT_IN_ALL_RUNS = (ItemKind.OUTPUT, ItemKind.OUTPUT_GRADIENT)
"""Kinds of which a strategy need not show all: a stage of a pipeline, or a fused layer, has other modules."""


def judge_runs(
    trace: Trace,
    tolerance: Tolerance,
    measured: Iterable[Measured],
    facts: RunFacts,
    found: Mapping[int, Trace] | None = None,
    is_whole: bool = True,
) -> ParityVerdict:
    """Return the verdict on a candidate.

    Args:
        measured: Of all its ranks.
        found: By rank, the parts that its ``TraceComparison`` kept.
        is_whole: Whether it came to its end; if not, nothing that it lacks differs.
    """
    by_item: dict[TraceItem, list[Measured]] = defaultdict(list)
    for one in measured:
        by_item[one.item].append(one)
    order = {item: item.order(trace.position(item)) for item in trace}
    order |= {item: item.order(len(trace)) for item in by_item if item not in order}

    findings = _steps(trace, by_item) if is_whole else []
    apart_steps = {finding.item.step for finding in findings}
    missing, notes = _missing(trace, by_item, apart_steps) if is_whole else ([], [])
    findings += missing
    ratios: list[Ratio] = []
    kinks = Kinks()
    for item in sorted(by_item, key=order.__getitem__):
        if item.step in apart_steps:
            continue
        limit = kinks.widened(item, tolerance.get(item.key, Limit()))
        finding, ratio = _of_item(trace, item, by_item[item], limit)
        is_gradient = finding is not None and item.kind is ItemKind.OUTPUT_GRADIENT
        # An element on the other side of a kink is no error, but what comes after it moves by more.
        if finding and is_gradient and are_switched(_parts_of(trace, by_item[item], found or {}), limit):
            kinks.add(item, finding.distance)
            continue
        findings += [finding] if finding else []
        ratios += [ratio] if ratio else []
    findings += [_added(item, parts) for item, parts in _additions(by_item, apart_steps)]
    notes += _of_kinks(kinks.items)
    findings.sort(key=lambda finding: order.get(finding.item, finding.item.order(-1)))
    first = order.get(findings[0].item, findings[0].item.order(-1)) if findings else None
    before = sum(1 for one in ratios if first is None or order[one.item] < first)
    findings[:EXAMINED] = [
        _examined(trace, finding, by_item, facts, found or {}) for finding in findings[:EXAMINED]
    ]
    return ParityVerdict(facts, tolerance.multiple, tuple(ratios), tuple(findings), before, tuple(notes))


def judge_repeat(trace: Trace, measured: Iterable[Measured], facts: RunFacts) -> ParityVerdict:
    """Return the verdict on two runs of the reference, which must be equal to the last bit."""
    return judge_runs(trace, Tolerance({}, 0), measured, facts)


def _of_item(
    trace: Trace, item: TraceItem, parts: Sequence[Measured], limit: Limit
) -> tuple[Mismatch | None, Ratio | None]:
    """Put together what ranks have of an item: each element once, and of several copies the furthest."""
    known = [one for one in parts if not one.is_missing]
    holders = tuple(sorted(one.rank for one in known))
    if not known or limit.wrong >= 1:
        return None, None
    other = [one for one in known if one.shape is not None]
    if other:
        ranks = tuple(sorted(one.rank for one in other))
        shapes = (other[0].shape or (), trace.shape(item))
        return Mismatch(item, Fault.SHAPE, ranks, holders, shapes=shapes), None
    copies: dict[object, list[Measured]] = defaultdict(list)
    for one in known:
        copies[one.boxes].append(one)
    furthest = [max(ones, key=lambda one: (one.sums.wrong, one.sums.apart)) for ones in copies.values()]
    total = sum((one.sums for one in furthest), DistanceSums())
    ratio, distance = limit.ratio(total), limit.distance(total)
    if ratio <= 1:
        return None, Ratio(item, ratio, distance)
    # A part is wrong by itself if it is too far relative to the usual size of the tensor's elements.
    usual = math.sqrt(total.expected / total.elements) if total.elements else 0.0
    alone = limit._replace(floor=max(limit.floor, usual))
    wrong = [one for one in known if alone.ratio(one.sums) > 1] or known
    together = sum((one.sums for one in wrong), DistanceSums())
    finding = Mismatch(
        item,
        Fault.DIFFERS,
        tuple(sorted(one.rank for one in wrong)),
        holders,
        distance,
        limit.spread,
        limit.relative,
        _factor(together, limit.relative),
    )
    return finding, Ratio(item, ratio, distance)


def _factor(sums: DistanceSums, allowed: float) -> float | None:
    """Return the factor between what is expected and what was found."""
    if sums.wrong or not sums.expected:
        return None
    # The factor of least squares; ``left`` is the square of what it leaves of what was found.
    factor = sums.product / sums.expected
    left = max(sums.found - factor * sums.product, 0.0)
    # Little beside what rounding explains, and beside the difference that the factor is to explain.
    is_all = left <= min(max(3 * allowed, 1e-3), 0.3 * abs(factor - 1)) ** 2 * sums.found
    return factor if is_all else None


def _steps(trace: Trace, by_item: Mapping[TraceItem, object]) -> list[Mismatch]:
    """Return steps that only one run made."""
    expected, found = ({item.step for item in items if item.step} for items in (trace, by_item))
    return [
        Mismatch(TraceItem(step, ItemKind.BATCH, ""), Fault.STEP, distance=0.0 if step in found else math.inf)
        for step in sorted(expected ^ found)
    ]


def _missing(
    trace: Trace, by_item: Mapping[TraceItem, Sequence[Measured]], apart_steps: set[int]
) -> tuple[list[Mismatch], list[str]]:
    """Find what no rank has, with notes on kinds that the candidate shows nowhere, or need not show."""
    shown = {item.kind for item in by_item}
    lacking = [item for item in trace if item not in by_item and item.step not in apart_steps]
    absent = Counter(item.kind for item in lacking if item.kind not in shown)
    hidden = Counter(item.kind for item in lacking if item.kind in shown and item.kind in NOT_IN_ALL_RUNS)
    notes = [
        f"Nothing was compared as {kind.value}: the candidate shows none of {number:,}."
        for kind, number in absent.items()
    ]
    notes += [
        f"{count(number, 'tensor')} of the kind {kind.value} {'was' if number == 1 else 'were'} not compared: "
        "the candidate calls other modules."
        for kind, number in hidden.items()
    ]
    findings = [
        Mismatch(item, Fault.MISSING)
        for item in lacking
        if item.kind in shown and item.kind not in NOT_IN_ALL_RUNS
    ]
    return findings, notes


def _additions(
    by_item: Mapping[TraceItem, Sequence[Measured]], apart_steps: set[int]
) -> list[tuple[TraceItem, Sequence[Measured]]]:
    return [
        (item, parts)
        for item, parts in by_item.items()
        if item.step not in apart_steps
        and item.kind not in NOT_IN_ALL_RUNS
        and any(one.is_missing for one in parts)
    ]


def _added(item: TraceItem, parts: Sequence[Measured]) -> Mismatch:
    ranks = tuple(sorted(one.rank for one in parts if one.is_missing))
    looks_like = ""
    if item.kind is ItemKind.BATCH and item.micro_batch:
        looks_like = (
            f"It looks as if the optimizer's step was skipped on {of_ranks(ranks)}, "
            "which read on in this step."
        )
    return Mismatch(item, Fault.ADDED, ranks, ranks, looks_like=looks_like)


def _examined(
    trace: Trace,
    finding: Mismatch,
    by_item: Mapping[TraceItem, Sequence[Measured]],
    facts: RunFacts,
    found: Mapping[int, Trace],
) -> Mismatch:
    """Add what the difference looks like."""
    if finding.fault is not Fault.DIFFERS:
        return finding
    parts = _parts_of(trace, by_item[finding.item], found)
    agreeing = tuple(rank for rank in finding.holders if rank not in {one.rank for one in parts})
    numbers = None
    if parts and parts[0].expected.numel() == 1:
        numbers = (float(parts[0].found), float(parts[0].expected))
    elif finding.factor is not None and math.prod(trace.shape(finding.item)) == 1:
        expected = float(trace.tensor(finding.item))
        numbers = (finding.factor * expected, expected)
    looks_like = recognise(
        Case(finding.item, tuple(parts), agreeing, finding.factor, finding.allowed, trace, facts)
    )
    return replace(finding, numbers=numbers, looks_like=looks_like)


def _parts_of(trace: Trace, parts: Sequence[Measured], found: Mapping[int, Trace]) -> list[RankPart]:
    """Return what ranks hold of an item, as far as it was kept."""
    return [
        RankPart(one.rank, found[one.rank].tensor(one.item), trace.held(one.item, one.boxes), one.boxes)
        for one in parts
        if one.rank in found and one.item in found[one.rank] and not one.is_missing and one.shape is None
    ]


def _of_kinks(items: Sequence[TraceItem]) -> list[str]:
    if not items:
        return []
    names = sorted({f"`{item.name}`" for item in items})
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"Rounding puts elements of {names[0]}{others} on the other side of a kink (a ReLU, a maximum) in step "
        f"{items[0].step}: what comes after it is compared less closely."
    ]
