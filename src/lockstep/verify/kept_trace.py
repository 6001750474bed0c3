"""What a candidate is compared with: a reference of now, or its trace, which an earlier check has kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.format.documents import validated
from lockstep.config.values import plain
from lockstep.errors import ConfigError
from lockstep.verify.judge.tolerance import Tolerance
from lockstep.verify.runs import CouldNotRun
from lockstep.verify.spec import ProcessFacts
from lockstep.verify.trace.file import DAMAGED, Trace
from lockstep.verify.trace.items import TraceItem


@dataclass(frozen=True)
class ReferenceRun:
    """What a candidate is compared with."""

    trace: Trace
    tolerance: Tolerance
    facts: ProcessFacts


def keep(reference: ReferenceRun, path: Path) -> None:
    """Copy the trace of a reference to ``path``, with what rounding explains of it.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        reference.trace.copy(path, {"tolerance": reference.tolerance.to_json()})
    except OSError as error:
        raise ConfigError(
            f"--record {path} cannot be written: {error.strerror or error}. Name another file."
        ) from None


def kept_in(path: Path, seed: int, steps: int) -> ReferenceRun:
    """Return what ``keep`` has written, for a check with this seed and number of steps.

    Raises:
        ConfigError: there is no such trace.
        CouldNotRun: it was recorded with another seed, or for other steps.
    """
    trace = Trace(path)
    if "tolerance" not in trace.facts:
        raise ConfigError(
            f"{path} was not written by `lockstep check --record`. Write one with that command."
        )
    fields = dict(trace.facts)
    try:
        limits = Tolerance.from_json(validated(dict, fields.pop("tolerance"), "tolerance"))
        facts = ProcessFacts.of(fields)
        items = validated(list[TraceItem], list(trace), "order")
        if not all(trace.has_known_type(item) and item.key in limits for item in items):
            raise ValueError("a tensor is of an unknown type, or has no tolerance")
    except DAMAGED as error:
        raise ConfigError(
            f"{path} is damaged: {plain(str(error), 200)}. Record it again with `lockstep check --record`."
        ) from None
    for name, then, now in (("seed", facts.seed, seed), ("steps", facts.steps_asked, steps)):
        if then != now:
            raise CouldNotRun(
                f"{path} was recorded with --{name} {then}, but this check has --{name} {now}, so the "
                f"{'random numbers' if name == 'seed' else 'steps'} would differ. Check with --{name} {then}, or "
                "record again."
            )
    return ReferenceRun(trace, limits, facts)


def refuse_other_run(
    reference: ProcessFacts, candidate: ProcessFacts, against: Path | None, nproc: int
) -> None:
    """Raise CouldNotRun where a reference is of another number of batches, precision or dropout.

    ``against``: the trace that it was kept in.
    """
    if reference.data_ranks != candidate.data_ranks:
        raise CouldNotRun(
            f"{against} was recorded for {reference.data_ranks} ranks with batches of their own, but the "
            f"candidate has {candidate.data_ranks}. Record again with --nproc {nproc}, or check with the same "
            "number of ranks."
        )
    if reference.mixed_precision != candidate.mixed_precision:
        raise CouldNotRun(
            f"The reference was made for mixed_precision={reference.mixed_precision!r}, but the candidate computes "
            f"with {candidate.mixed_precision!r}. Record again with --mixed-precision {candidate.mixed_precision}."
        )
    if reference.drops_out != candidate.drops_out:
        was, are = ("on", "off") if reference.drops_out else ("off", "on")
        raise CouldNotRun(
            f"{against} was recorded with dropout {was}, but with {candidate.parallel or 'one process'} it is "
            f"{are}: with tp, pp or cp a check turns dropout off. Record again with the strategy that you want "
            "to check."
        )
