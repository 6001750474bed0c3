"""Who was the first to go wrong: what micro-batches did, compared with nothing, or with ordinary ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lockstep.observe.spikes.history import RecentValues
from lockstep.replay.trace import Health, MicroBatchTrace, ModuleCall
from lockstep.replay.verdict import ReplayFinding

FAR = 10.0
"""Times its usual spread above the median."""
LEAST_RATIO = 2.0
"""Over the median: few ordinary batches may have hardly any spread."""
LEAST_ORDINARY = 4


def not_finite(traces: Iterable[MicroBatchTrace]) -> ReplayFinding | None:
    """Return the first module, in the first micro-batch, that made what is not finite; None: all is finite.

    In a forward that is the module that has finite inputs, and an output that is not, or calls another with what it has
    spoilt itself. -inf alone counts only where what follows does not get over it, as a softmax does.
    """
    for trace in traces:
        found = _in_forward(trace) or _in_loss(trace) or _in_backward(trace)
        if found is not None:
            return found
    return None


def _in_forward(trace: MicroBatchTrace) -> ReplayFinding | None:
    # In the order of time: the first call that gets or gives what is bad is nearest to where it was made.
    for number, has_ended in trace.order:
        call = trace.calls[number]
        if not has_ended and call.inputs is Health.BAD:
            return _of_caller(trace, call)
        if has_ended and call.outputs is Health.BAD:
            if call.inputs is not Health.LOW:
                return _of_call(trace, call)
            # -inf was passed down: it was made by whoever called the outermost module that got it.
            while call.parent is not None and trace.calls[call.parent].inputs is Health.LOW:
                call = trace.calls[call.parent]
            return _of_caller(trace, call)
        makes_low = has_ended and call.outputs is Health.LOW and call.inputs is not Health.LOW
        if makes_low and not _is_got_over(trace, number):
            return _of_call(trace, call)
    return None


def _is_got_over(trace: MicroBatchTrace, number: int) -> bool:
    """Return whether the first call that gets this -inf as it is, or all there is afterwards, is finite."""
    behind = trace.order[trace.order.index((number, True)) + 1 :]
    for other, has_ended in behind:
        call = trace.calls[other]
        if not has_ended and call.inputs is Health.LOW:
            return call.outputs is Health.FINE
        if has_ended and call.outputs is not Health.FINE and _is_inside(trace, number, other):
            # It passes on what was made inside of it.
            continue
    is_spoilt = any(trace.calls[other].outputs is Health.BAD for other, has_ended in behind if has_ended)
    return not is_spoilt and all(map(math.isfinite, trace.losses))


def _is_inside(trace: MicroBatchTrace, inner: int, outer: int) -> bool:
    at: int | None = inner
    while at is not None and at != outer:
        at = trace.calls[at].parent
    return at == outer


def _of_call(trace: MicroBatchTrace, call: ModuleCall) -> ReplayFinding:
    return ReplayFinding(
        "forward", call.name, call.kind, trace.rank, trace.number, f"its output has {call.health_text}"
    )


def _of_caller(trace: MicroBatchTrace, call: ModuleCall) -> ReplayFinding:
    """Blame the caller of ``call``, which got what is not finite."""
    first = next((c for n, e in trace.order if e and (c := trace.calls[n]).outputs is Health.BAD), call)
    if call.parent is None:
        where, what = (
            ("batch", trace.batch) if trace.batch else ("script", f"{_named(call)} was called with it")
        )
        return ReplayFinding(where, "", "", trace.rank, trace.number, what, first_output=_named(first))
    caller = trace.calls[call.parent]
    what = f"its own code made it, before it called {_named(call)}"
    return ReplayFinding(
        "forward", caller.name, caller.kind, trace.rank, trace.number, what, first_output=_named(first)
    )


def _in_loss(trace: MicroBatchTrace) -> ReplayFinding | None:
    bad = next((loss for loss in trace.losses if not math.isfinite(loss)), None)
    if bad is None:
        return None
    kind = "NaN" if math.isnan(bad) else "infinite"
    what = f"it is {kind}, computed by the script from finite outputs of its models"
    return ReplayFinding("loss", "", "", trace.rank, trace.number, what, line=trace.loss_line)


def _in_backward(trace: MicroBatchTrace) -> ReplayFinding | None:
    fault = trace.fault
    if fault is None:
        return None
    # Forward numbers the nodes that it makes, so that a call has a range of them: begin <= node < end.
    around = [call for call in trace.calls if call.begin <= fault.node < call.end]
    what = "the gradient that it passes on is not finite"
    if not around:
        return ReplayFinding(
            "script", "", "", trace.rank, trace.number, what, operation=fault.operation, line=fault.line
        )
    # Calls are nested: the innermost has the smallest range.
    call = min(around, key=lambda one: one.end - one.begin)
    return ReplayFinding(
        "backward",
        call.name,
        call.kind,
        trace.rank,
        trace.number,
        what,
        operation=fault.operation,
        line=fault.line,
    )


Key = tuple[object, ...]
"""Of the same number in every micro-batch."""


def far_outside(
    traces: Sequence[MicroBatchTrace], ordinary: Sequence[MicroBatchTrace]
) -> ReplayFinding | None:
    """Return the first module whose output, or else the gradient that it passes on, is far above those of
    ordinary batches.

    Of several micro-batches the one in which something is farthest away is looked at.
    """
    if len(ordinary) < LEAST_ORDINARY:
        return None
    for sizes_of, finding_of in ((_forward_sizes, _far_value), (_gradients, _far_gradient)):
        usual: dict[Key, RecentValues] = {}
        for trace in ordinary:
            for key, size in sizes_of(trace):
                usual.setdefault(key, RecentValues(len(ordinary), LEAST_ORDINARY)).add(size)
        scored = [(trace, [_score(usual, key, size) for key, size in sizes_of(trace)]) for trace in traces]
        trace, scores = max(scored, key=lambda pair: max(pair[1], default=0.0))
        if max(scores, default=0.0) > FAR:
            return finding_of(trace, scores)
    return None


def _score(usual: dict[Key, RecentValues], key: Key, size: float) -> float:
    """Score a value; 0: near the others, or not known."""
    score = usual[key].score(size) if key in usual else None
    is_larger = score is not None and size > LEAST_RATIO * usual[key].median_and_mad()[0]
    return score if score is not None and is_larger else 0.0


def _sizes(trace: MicroBatchTrace) -> list[tuple[int, bool, float]]:
    """Return (number of the call, whether that is what it gave, root mean square), in the order of time."""
    calls = [(number, has_ended, trace.calls[number]) for number, has_ended in trace.order]
    sizes = [(number, ended, call.rms if ended else call.inputs_rms) for number, ended, call in calls]
    return [(number, ended, size) for number, ended, size in sizes if size is not None]


def _forward_sizes(trace: MicroBatchTrace) -> list[tuple[Key, float]]:
    return [((*trace.key(number), has_ended), size) for number, has_ended, size in _sizes(trace)]


def _gradients(trace: MicroBatchTrace) -> list[tuple[Key, float]]:
    return [((*trace.key(one.call), one.is_input), one.rms) for one in trace.gradients]


def _far_value(trace: MicroBatchTrace, scores: list[float]) -> ReplayFinding:
    at = next(i for i, score in enumerate(scores) if score > FAR)
    number, has_ended, size = _sizes(trace)[at]
    call = trace.calls[number]
    found = ReplayFinding("forward", call.name, call.kind, trace.rank, trace.number, score=scores[at])
    described = _magnitude_text(size, scores[at])
    if has_ended:
        return replace(found, what=f"its output has {described}")
    what = f"{_named(call)} gets what has {described}"
    if call.parent is None:
        return replace(found, where="batch", module="", kind="", what=what)
    caller = trace.calls[call.parent]
    return replace(found, module=caller.name, kind=caller.kind, what=f"its own code made it: {what}")


def _far_gradient(trace: MicroBatchTrace, scores: list[float]) -> ReplayFinding:
    """Find who passed on the first gradient that is far outside: the innermost call that got the tensor.

    Where no call did, the code did it in which that tensor was made.
    """
    at = next(i for i, score in enumerate(scores) if score > FAR)
    first = trace.gradients[at]
    of_tensor = [one for one in trace.gradients if one.tensor == first.tensor]
    users = [one.call for one in of_tensor if one.is_input]
    makers = [trace.calls[one.call].parent for one in of_tensor if not one.is_input]
    # Calls are numbered as they begin: of nested ones the innermost has the greatest number.
    number = max(users) if users else next((parent for parent in makers if parent is not None), 0)
    call = trace.calls[number]
    what = f"the gradient that it passes on has {_magnitude_text(first.rms, scores[at])}"
    return ReplayFinding("backward", call.name, call.kind, trace.rank, trace.number, what, score=scores[at])


def _magnitude_text(size: float, score: float) -> str:
    return f"a root mean square of {size:.4g}, {score:.0f} times its usual spread above the median"


def _named(call: ModuleCall) -> str:
    return f"{call.name} ({call.kind})" if call.name else call.kind
