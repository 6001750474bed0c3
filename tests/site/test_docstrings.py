"""Docstrings of public names tell what a caller needs. Each rule notices a docstring that breaks it."""

from __future__ import annotations

import pytest
import torch

from tests.site.docstrings import (
    docstring,
    everything,
    hard_to_read,
    prose,
    unnamed,
    unnamed_exceptions,
    without_shape,
)
from tests.site.plain_english import sentences

EVERYTHING = everything()
CLASSES = {path: value for path, value in EVERYTHING.items() if isinstance(value, type)}


def test_all_functions_classes_methods_and_properties_are_looked_at() -> None:
    assert len(EVERYTHING) > 550
    assert "lockstep.Accelerator.device" in EVERYTHING
    assert "lockstep.utils.fsdp2_prepare_model" in EVERYTHING


def test_each_begins_with_a_sentence() -> None:
    assert [path for path, value in EVERYTHING.items() if docstring(value).split("\n\n")[0][-1:] != "."] == []


def test_each_argument_is_named() -> None:
    around = {path: docstring(value) for path, value in CLASSES.items()}
    found = {
        path: unnamed(value, around.get(path.rpartition(".")[0], "")) for path, value in EVERYTHING.items()
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_each_argument_with_tensors_has_a_shape() -> None:
    found = {path: without_shape(value) for path, value in EVERYTHING.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_each_exception_that_is_raised_is_named() -> None:
    found = {path: unnamed_exceptions(value) for path, value in EVERYTHING.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_each_is_easy_to_read() -> None:
    found = {path: hard_to_read(value) for path, value in EVERYTHING.items()}
    assert {path: texts for path, texts in found.items() if texts} == {}
    assert sum(len(sentences(prose(value))) for value in EVERYTHING.values()) > 1500


def bad(rows: torch.Tensor, dim: int = 0, *rest: int) -> None:
    """Add up the rows of dimension dim, of some width [rows, width], as nobody who reads this sentence to its end will
    be able to tell without reading it a second time or asking the person who once wrote it down here.

    Args:
        rows: The rows.
        rest_of_it: Another.
    """
    if dim:
        raise TypeError("There is no such dimension.")

    def later() -> None:
        raise KeyError("of another function")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (unnamed(bad), ["dim", "rest"]),
        (without_shape(bad), ["rows"]),
        (unnamed_exceptions(bad), ["TypeError"]),
    ],
)
def test_what_is_missing_is_noticed(found: list[str], expected: list[str]) -> None:
    assert found == expected


def test_a_riddle_and_a_long_sentence_are_noticed() -> None:
    riddle, long = hard_to_read(bad)
    assert riddle == "nobody"
    assert long.startswith("Add up")
