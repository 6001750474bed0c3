"""Traces that were kept and are no reference for a candidate: of other ranks, in another precision, damaged."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.verify import (
    CouldNotRun,
    ProcessFacts,
    ReferenceRun,
    keep,
    kept_in,
    refuse_other_run,
    tolerance_of,
)
from tests.verify.runs import measure, record, shaken, synthetic

PATH = Path("kept.trace")
KEPT = ProcessFacts(data_ranks=2, parallel="ddp")


def test_one_like_the_candidate_is_compared_with() -> None:
    refuse_other_run(KEPT, replace(KEPT, parallel="zero=3", rank=1, data_rank=1), PATH, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_ranks": 4}, "recorded for 2 ranks with batches of their own, but the candidate has 4"),
        (
            {"mixed_precision": "bf16"},
            "made for mixed_precision='no', but the candidate computes with 'bf16'",
        ),
        ({"drops_out": False, "parallel": "tp=2"}, "recorded with dropout on, but with tp=2 it is off"),
    ],
    ids=str,
)
def test_others_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(CouldNotRun) as raised:
        refuse_other_run(KEPT, replace(KEPT, **changes), PATH, 2)  # type: ignore[arg-type]
    assert said in str(raised.value)


Edit = Callable[[dict[str, Any]], object]


def facts_changed(**changes: object) -> Edit:
    """Other values in the facts of a trace."""

    def edit(header: dict[str, Any]) -> None:
        about = header["__metadata__"]
        about["facts"] = json.dumps({**json.loads(about["facts"]), **changes})

    return edit


def metadata_changed(**changes: str) -> Edit:
    return lambda header: header["__metadata__"].update(changes)


def one_entry_renamed(header: dict[str, Any]) -> None:
    header["no item"] = header.pop(next(key for key in header if key != "__metadata__"))


def keys_renamed(header: dict[str, Any]) -> None:
    """All names are those of another list of tensors."""
    entries = {f"[{place}]": header[key] for place, key in enumerate(header) if key != "__metadata__"}
    about = {**header["__metadata__"], "order": json.dumps(list(entries))}
    header.clear()
    header.update({"__metadata__": about, **entries})


EDITS: dict[str, Edit] = {
    "no facts": lambda header: header["__metadata__"].pop("facts"),
    "facts torn": metadata_changed(facts="{"),
    "facts deep": metadata_changed(facts="[" * 100_000),
    "no order": lambda header: header["__metadata__"].pop("order"),
    "order of lists": metadata_changed(order="[[3]]"),
    "another format": metadata_changed(format="lockstep trace 1"),
    "an entry renamed": one_entry_renamed,
    "entries that are no items": keys_renamed,
    "tolerance a list": facts_changed(tolerance=[]),
    "limits of text": facts_changed(tolerance={"multiple": 10.0, "limits": {"a": ["b"]}}),
    "limits of nothing": facts_changed(tolerance={"multiple": 10.0, "limits": {}}),
    "axes a list": facts_changed(axes=[1]),
    "seed of text": facts_changed(seed="now"),
}


def kept(folder: Path) -> Path:
    """A trace as ``lockstep check --record`` keeps it."""
    tensors = synthetic(steps=1)
    trace = record(folder / "run.trace", tensors)
    limits = tolerance_of(trace, measure(trace, folder / "disturbed", [shaken(tensors)])[0])
    trace.facts.update(ProcessFacts(made=1, steps_asked=3).to_json())
    keep(ReferenceRun(trace, limits, ProcessFacts()), folder / "kept.trace")
    return folder / "kept.trace"


def rewritten(path: Path, edit: Edit) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def test_a_kept_trace_is_read_as_it_was(tmp_path: Path) -> None:
    path = kept(tmp_path)
    rewritten(path, lambda header: None)
    reference = kept_in(path, seed=0, steps=3)
    assert (reference.facts.steps_asked, len(reference.tolerance)) == (3, len(list(reference.trace)))
    found = {item: reference.trace.tensor(item) for item in reference.trace}
    assert all(torch.equal(found[item], tensor) for item, tensor in synthetic(steps=1).items())


@pytest.mark.parametrize("name", EDITS)
def test_a_damaged_trace_is_refused(tmp_path: Path, name: str) -> None:
    path = kept(tmp_path)
    rewritten(path, EDITS[name])
    with pytest.raises(ConfigError, match=r"kept\.trace (cannot be read as a trace|is damaged)"):
        kept_in(path, seed=0, steps=3)


@pytest.mark.timeout(60)
def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in (
        (tmp_path / "pipe", "is a pipe"),
        (tmp_path, "is a folder"),
        (tmp_path / "no", "No such"),
    ):
        with pytest.raises(ConfigError, match=what):
            kept_in(path, seed=0, steps=3)


def test_a_torn_trace_is_refused(tmp_path: Path) -> None:
    path, draws = kept(tmp_path), random.Random(0)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for length in (0, 1, 8, 9, end - 1, end, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError, match="cannot be read as a trace"):
            kept_in(path, seed=0, steps=3)
    for _ in range(200):
        torn = bytearray(content)
        torn[draws.randrange(end)] ^= 1 << draws.randrange(8)
        path.write_bytes(torn)
        # A flipped bit of a number may leave a trace that is one.
        with contextlib.suppress(ConfigError, CouldNotRun):
            kept_in(path, seed=0, steps=3)


def test_a_trace_is_written_past_links_that_others_have_made(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    for name in ("kept.trace", "kept.trace.partial", ".kept.trace.partial"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    assert kept_in(kept(tmp_path), seed=0, steps=3).facts.steps_asked == 3
    assert (tmp_path / "victim").read_text() == "precious"
