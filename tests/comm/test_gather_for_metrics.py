"""``gather_for_metrics`` of texts: in lists, alone or in tuples and mappings, each sample once. Oracle: the data."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import Accelerator
from lockstep.runtime import end_runtime

Pair = namedtuple("Pair", ["texts", "rows"])


def forms(batch: torch.Tensor) -> dict[str, Any]:
    numbers = batch.tolist()
    texts, others = [f"p{i}" for i in numbers], [f"r{i}" for i in numbers]
    return {
        "list": texts,
        "tuple of lists": (texts, others),
        "mapping of lists": {"p": texts, "r": others},
        "nested": {"p": (texts, batch), "r": others},
        "tensor and list": (batch, texts),
        "named": Pair(texts, batch),
        "tensors": (batch, {"p": batch * 2}),
        "lists of lists": (texts, [[i, i] for i in numbers]),
        "three for each row": ([text for text in texts for _ in range(3)], texts),
        "pairs": list(zip(texts, others, strict=True)),
        "tuple of texts": tuple(texts),
        "empty and full": (texts, [[] for _ in numbers]),
        "rows without a text": ([None for _ in numbers], others),
    }


def joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts).tolist()
    if isinstance(first, list) or isinstance(first[0 if isinstance(first, tuple) else "p"], str):
        return [row for part in parts for row in part]
    if isinstance(first, dict):
        return {name: joined([part[name] for part in parts]) for name in first}
    found = [joined([*of_all]) for of_all in zip(*parts, strict=True)]
    return Pair(*found) if isinstance(first, Pair) else tuple(found)


def gathered(samples: int) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    found = {}
    for form in forms(torch.arange(1)):
        loader = accelerator.prepare(DataLoader(torch.arange(samples), batch_size=2))  # type: ignore[arg-type]
        parts = [accelerator.gather_for_metrics(forms(batch)[form]) for batch in loader]
        found[form] = joined(parts)
    end_runtime()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_sample_is_there_once_in_its_form(run_distributed: Any, world_size: int) -> None:
    for samples in (5, 8, 9):
        expected = {name: joined([data]) for name, data in forms(torch.arange(samples)).items()}
        for found in run_distributed(gathered, world_size, samples):
            for name, data in expected.items():
                assert found[name] == data, (name, samples)


def warned_of_gather(samples: int) -> list[str]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(samples), batch_size=2))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            accelerator.gather(batch)
            accelerator.gather(torch.ones(3))  # not of the batch
    end_runtime()
    return [str(one.message) for one in caught if one.filename == __file__]


def test_gather_of_rows_that_only_fill_up_the_last_batch_names_the_better_call(run_distributed: Any) -> None:
    assert run_distributed(warned_of_gather, 2, 8) == [[], []]
    (said,), others = run_distributed(warned_of_gather, 2, 5)
    assert "4 rows of the last batch" in said and "gather_for_metrics" in said
    assert others == []
