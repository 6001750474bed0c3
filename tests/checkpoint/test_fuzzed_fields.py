"""Every field of every document of a checkpoint replaced by what it is not: refused before anything changes, or usable.

Digests are right, as a forger's would be. Either ``load_state`` raises CheckpointError and the run is bit for bit what
it was, or it loads and the next step works and gives numbers.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkpoint.draft import Draft
from checkpoint.subject import FEATURES
from lockstep import Accelerator
from lockstep.checkpoint.format import canonical, parse_json
from lockstep.errors import CheckpointError, LockstepError
from tests.refusals import expect_refusal

MISSING = object()
DEEP: Any = 0
for _ in range(90):
    DEEP = [DEEP]
VALUES: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "number": 3,
    "negative": -1,
    "zero": 0,
    "fraction": 0.5,
    "huge": 10**30,
    "NaN": {"$": "float", "value": "nan"},
    "infinite": {"$": "float", "value": "inf"},
    "text": "x",
    "list": [1, "a"],
    "empty list": [],
    "deep list": DEEP,
    "dict": {"a": 1},
    "empty dict": {},
    "bool": True,
}


def fields(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document; of lists the first item only."""
    if path:
        yield path
    if isinstance(document, dict):
        for key, value in document.items():
            yield from fields(value, (*path, key))
    elif isinstance(document, list) and document:
        yield from fields(document[0], (*path, 0))


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    if value is MISSING:
        del document[path[-1]]
    else:
        document[path[-1]] = copy.deepcopy(value)


class Small:
    """A run inside an accumulation window, with weighted losses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(FEATURES, 2)
        made = torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True)
        rows = TensorDataset(torch.randn(12, FEATURES), torch.randint(0, 2, (12,)))
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model,
            made,
            DataLoader(rows, batch_size=2, shuffle=True),
            torch.optim.lr_scheduler.StepLR(made, 2),
        )

    def train(self, micro_batches: int) -> None:
        for number, (rows, labels) in enumerate(self.loader, start=1):
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(rows), labels)
                self.accelerator.backward(loss, weight=float(number))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if number == micro_batches:
                break

    def state(self) -> str:
        inner = self.optimizer.optimizer
        window = self.accelerator._accumulation.state_dict()
        return repr(
            [
                self.accelerator.unwrap_model(self.model).state_dict(),
                inner.state_dict(),
                self.schedule.scheduler.state_dict(),
                self.loader.state_dict(),
                [p.grad for p in self.model.parameters()],
                window,
                torch.get_rng_state().numpy().tobytes(),
            ]
        )

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(p).all()) for p in self.model.parameters())


def saved(folder: Path) -> Draft:
    run = Small()
    run.train(3)  # inside of the second window
    run.accelerator.save_state(folder)
    return Draft(folder)


def outcome(draft: Draft, folder: Path, run: Small) -> str:
    """What is wrong with how a draft is dealt with; nothing if it is right. ``run`` is as good as new afterwards."""
    draft.write(folder)
    torch.manual_seed(5)
    before = run.state()
    try:
        run.accelerator.load_state(folder)
    except CheckpointError as error:
        if run.state() != before:
            return f"changed the run, then: {error}"
        return "" if str(error).count("\n") == 0 else f"more than a line: {error}"
    except LockstepError as error:
        return f"another error: {type(error).__name__} {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)
    try:
        run.train(3)
    except Exception as error:
        return f"loaded, then {type(error).__name__}: {error}"
    return "" if run.is_finite() else "loaded, and then weights were no numbers"


@pytest.mark.parametrize("document", ["body", "common", "own", "index"])
def test_each_field_is_checked_before_anything_changes(tmp_path: Path, document: str) -> None:
    """Replaced by each value; of these cases a part is tried, which is another one for each field."""
    draft, run, wrong, number = saved(tmp_path / "saved"), Small(), [], 0
    for path in fields(getattr(draft, document)):
        for what, value in VALUES.items():
            number += 1
            if number % 61:
                continue
            changed = draft.copy()
            replaced(getattr(changed, document), path, value)
            if found := outcome(changed, tmp_path / "forged", run):
                wrong.append(f"{'.'.join(map(str, path))} = {what}: {found}")
                run = Small()
    assert number > 100
    assert wrong == []


def other_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """As ``Draft.replace_tensor`` takes them."""
    return {
        "a scalar": torch.tensor(1.0),
        "one element": torch.ones(1),
        "empty": torch.ones(0),
        "another shape": torch.ones(*tensor.shape, 2),
        "NaN": torch.full(tensor.shape, float("nan")),
        "negative": torch.full(tensor.shape, -1.0),
        "infinite": torch.full(tensor.shape, float("inf")),
        "integers": torch.ones(tensor.shape, dtype=torch.int64),
        "bytes": torch.ones(tensor.shape, dtype=torch.uint8),
        "float64": torch.ones(tensor.shape, dtype=torch.float64),
    }


def test_each_tensor_is_checked_before_anything_changes(tmp_path: Path) -> None:
    """Replaced by each other one; of these cases every second is tried, which are others for each tensor."""
    draft, run, wrong, count = saved(tmp_path / "saved"), Small(), [], 0
    for name, entry in draft.index.items():
        piece = entry["pieces"][0]
        stored = draft.tensors(piece["file"])[piece["key"]]
        for what, tensor in other_tensors(stored).items():
            is_data = not name.endswith(("step", "window_weight", "divisor")) and not name.startswith(
                "rank.0.rng"
            )
            if is_data and what in ("NaN", "infinite", "negative"):
                continue  # weights, moments and gradients of a run that has diverged are what was saved
            count += 1
            if count % 2:
                continue
            changed = draft.copy()
            changed.replace_tensor(name, tensor)
            if found := outcome(changed, tmp_path / "forged", run):
                wrong.append(f"{name} is {what}: {found}")
                run = Small()
    assert count > 60
    assert wrong == []


def test_many_ranks_take_no_time(tmp_path: Path) -> None:
    draft, run = saved(tmp_path / "saved"), Small()
    for world, ranks in (
        (2**17, [0]),
        (2**17, list(range(2**17))),
        (2, [0, 0]),
        (2, [1, 0]),
        (1, [0] * 100_000),
    ):
        changed = draft.copy()
        changed.body["saved"] |= {"world_size": world, "ranks": ranks}
        assert outcome(changed, tmp_path / "forged", run) == "", (world, ranks[:3])
        run = Small()


@pytest.mark.parametrize("content", [b"[" + b"0," * 10_000_001 + b"0]", b'"' + b"x" * (257 << 20) + b'"'])
def test_a_huge_document_is_refused_before_it_is_parsed(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda *arguments, **options: pytest.fail("it was parsed"))
    with pytest.raises(CheckpointError, match=r"\d+ bytes and \d+ values"):
        parse_json(content, "state.json")


def test_what_is_too_large_to_be_read_is_not_written() -> None:
    expect_refusal(LockstepError, "10000001", canonical, [0] * 10_000_001)
