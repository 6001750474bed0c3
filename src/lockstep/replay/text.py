"""What a replay has found, in a sentence and a table."""

from __future__ import annotations

from lockstep.replay.verdict import Compared, ReplayFinding, ReplayVerdict

TITLES = ("of", "rank", "micro-batch", "in the run", "in the replay", "bits")
RIGHT = ("rank", "micro-batch", "in the run", "in the replay")


def sentence(verdict: ReplayVerdict) -> str:
    """What was the first to go wrong in the step."""
    found = verdict.finding
    if found is None:
        compared = (
            f", and near what it is in {verdict.ordinary} ordinary micro-batches" if verdict.ordinary else ""
        )
        return f"Nothing unusual in step {verdict.step} ({verdict.spike}): all is finite{compared}."
    of = f"in micro-batch {found.micro_batch + 1} of rank {found.rank}, step {verdict.step}"
    where = {
        "forward": f"{_named(found)} is the first to go wrong, {of}: {found.what}.",
        "backward": f"{_named(found)} is the first to go wrong in backward, {of}: {found.what}.",
        "batch": f"The batch is wrong, {of}: {found.what}.",
        "loss": f"The loss is the first to go wrong, {of}: {found.what}.",
        "script": f"The script's own code is the first to go wrong, {of}: {found.what}.",
    }[found.where]
    further = [
        *([f"First output that is not finite: {found.first_output}."] if found.first_output else []),
        *([f"Operation: {found.operation}."] if found.operation else []),
        *([found.line] if found.line else []),
    ]
    return " ".join([where, *further])


def _named(found: ReplayFinding) -> str:
    return f"{found.module} ({found.kind})" if found.module else f"{found.kind}, the model itself,"


def rows(verdict: ReplayVerdict) -> list[tuple[str, ...]]:
    """A line for each number that the run and its replay have."""
    return [_row(one) for one in verdict.compared]


def _row(one: Compared) -> tuple[str, ...]:
    rank = "all" if one.rank is None else str(one.rank)
    number = "" if one.micro_batch is None else str(one.micro_batch + 1)
    return one.what, rank, number, f"{one.run:.9g}", f"{one.replay:.9g}", "same" if one.is_same else "differ"


def remarks(verdict: ReplayVerdict) -> list[str]:
    """Sentences on how far the replay is the run's step."""
    found = list(verdict.notes)
    if not verdict.has_same_bits:
        found.append(
            "The replay has other numbers than the run, so it is not the same step to the last bit. Replay with "
            "the same script, arguments, torch and machine. A model that was split over ranks or compiled "
            "rounds differently in the replay."
        )
    return found


def to_json(verdict: ReplayVerdict) -> dict[str, object]:
    """All of it."""
    return {
        "format": "lockstep replay 1",
        "sentence": sentence(verdict),
        "same_bits": verdict.has_same_bits,
        **verdict.to_json(),
    }
