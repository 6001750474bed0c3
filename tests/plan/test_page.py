"""The tables of docs/zero.md are those of the source."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.plan import OPTIMIZERS, dtypes, state_bytes
from lockstep.utils import Parallel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "zero.md").read_text(encoding="utf-8")
PSI = 10**9


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading; its first row is the head."""
    below = PAGE.split(f"\n## {heading}\n")[1]
    lines = re.search(r"(?:^\|.*\n)+", below, flags=re.MULTILINE)
    assert lines is not None
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in lines[0].splitlines()]
    return [rows[0], *rows[2:]]


def test_the_table_of_dtypes_is_that_of_the_source() -> None:
    head, *rows = table("Which type each tensor has")
    strategies = {"DDP": Parallel.parse("ddp"), "ZeRO": Parallel.parse("zero=3")}
    for column, title in enumerate(head[1:], start=1):
        strategy, precision = title.replace("`", "").split()
        assert {row[0]: row[column] for row in rows} == dtypes(strategies[strategy], precision)
    assert (
        dtypes(Parallel(zero=1), "bf16")
        == dtypes(Parallel(zero=2), "bf16")
        == dtypes(Parallel(zero=3), "bf16")
    )


def test_the_table_of_memory_is_that_of_the_source() -> None:
    head, *rows = table("Memory")
    assert len(rows) >= 3
    for ranks, *cells in rows:
        for text, cell in zip(head[1:], cells, strict=True):
            row = state_bytes(PSI, int(ranks), Parallel.parse(text), "no", block=PSI // 32)
            assert cell == f"{row.at_rest / 1e9:.2f} / {row.peak / 1e9:.2f}", (ranks, text)


def test_the_bytes_of_every_optimizer_are_listed() -> None:
    (sentence,) = re.findall(r"the optimizer state takes (.*?)\.\s+Frozen", PAGE, flags=re.DOTALL)
    listed: dict[str, int] = {}
    for number, names in re.findall(
        r"(\d)((?:[^\d]|\d(?!\b))*)", sentence.replace("none with", "0 bytes with")
    ):
        listed |= dict.fromkeys(re.findall(r"`([\w-]+)`", names), int(number))
    assert listed == OPTIMIZERS
