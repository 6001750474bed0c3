"""Errors, warnings and logs are easy to read: short sentences, no riddles, and what to do."""

from __future__ import annotations

import re

import pytest

from tests.site.messages import messages, problems
from tests.site.pages import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
LONG = (
    "The loader of this rank has 3 batches, which are fewer than those that the other ranks have, and which it "
    "would therefore have to repeat until the end of the epoch, as no rank can go on alone"
)


def test_all_messages_are_found() -> None:
    assert sum(len(messages(path.read_text(encoding="utf-8"))) for path in SOURCES) > 1500


@pytest.mark.parametrize(
    "package", sorted({path.relative_to(ROOT / "src/lockstep").parts[0] for path in SOURCES})
)
def test_messages_are_easy_to_read(package: str) -> None:
    place = ROOT / "src/lockstep" / package
    found = [
        f"{path.relative_to(ROOT)}:{message.line}: {problem}"
        for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))
        for message in messages(path.read_text(encoding="utf-8"))
        for problem in problems(message)
    ]
    assert found == []


def test_lines_have_one_prefix_and_percent_stands_behind_its_number() -> None:
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"[\"']lockstep (launch|check|tune|replay): |[\"']Error: \{", text), path
        said = [message.text for message in messages(text)]
        assert [one for one in said if re.search(r"(\d|X) %(?!\w)", one)] == [], path


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        (f'raise ConfigError("{LONG}. Give it more data.")', "39 words"),
        ('raise CheckpointError(f"{path} tells of ranks {ranks}. Load another checkpoint.")', "'tells of'"),
        ('raise UsageError(f"{name} lies in no block, where nobody chose. Use one.")', "'nobody'"),
        ('logger.warning("The order of %s is dealt anew. Use a seed.", name)', "'anew'"),
        ('warnings.warn("This is what is left. Drop it.", stacklevel=2)', "'what is left'"),
        ('raise click.UsageError("--every is simply wrong. Drop it.")', "'simply'"),
        ('def _why():\n    return "The batches are dealt out by rank 0 alone."', "'dealt'"),
        ('raise ConfigError(f"tp is {tp}, but must divide {ranks}.")', "does not say what to do"),
    ],
)
def test_a_message_that_has_to_be_read_twice_is_found(statement: str, problem: str) -> None:
    (message,) = messages(statement)
    assert any(problem in one for one in problems(message))


@pytest.mark.parametrize(
    "statement",
    [
        'raise ConfigError(f"tp is {tp}, but must divide {ranks}. Use 1 or {ranks}.")',
        'raise ValueError(f"{value} is not a number")',
        '"""What is left in no block is nobody\'s."""',
        'value["the name of a key"] = 1',
    ],
)
def test_good_messages_and_other_strings_are_no_problem(statement: str) -> None:
    assert [problem for message in messages(statement) for problem in problems(message)] == []
