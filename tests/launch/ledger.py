"""What the runs of ``elastic_run.py`` wrote down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def committed_step(folder: Path, of_round: int | None = None) -> int:
    """The last step that was saved, in any round or in one; 0 if there is none."""
    try:
        round, step, _ = (folder / "committed").read_text().split()
    except OSError:
        return 0
    return int(step) if of_round is None or int(round) == of_round else 0


def weights(folder: Path) -> dict[str, list[float]]:
    """The trained weights."""
    found: dict[str, list[float]] = json.loads((folder / "weights.json").read_text())
    return found


def samples_seen(folder: Path) -> list[int]:
    """Samples in the order of steps; of a step that ran again after a restart, the last time counts."""
    steps: dict[int, tuple[int, dict[int, list[int]]]] = {}
    first_of_round: dict[int, int] = {}
    for path in folder.glob("ledger-*.jsonl"):
        round, rank = (int(word) for word in path.stem.split("-")[1:])
        lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            first_of_round[round] = min(first_of_round.get(round, line["step"]), line["step"])
            latest, parts = steps.setdefault(line["step"], (round, {}))
            if round > latest:
                steps[line["step"]] = (round, {rank: line["ids"]})
            elif round == latest:
                parts[rank] = line["ids"]
    for step, (round, _) in list(steps.items()):  # what a later round went back behind does not count
        if any(later > round and first <= step for later, first in first_of_round.items()):
            del steps[step]
    return [
        sample for step in sorted(steps) for rank in sorted(steps[step][1]) for sample in steps[step][1][rank]
    ]


def worlds(folder: Path) -> list[int]:
    """The number of ranks in each round that trained."""
    texts = {int(path.stem.split("-")[1]): path.read_text() for path in folder.glob("ledger-*-0.jsonl")}
    return [int(json.loads(texts[round].splitlines()[0])["world"]) for round in sorted(texts) if texts[round]]
