"""Tables in ``docs/migrating-from-accelerate.md``: ``python -m tests.migration_tables`` writes them anew."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lockstep.cli import COMMANDS as OWN_COMMANDS
from lockstep.cli import COMMANDS_OF_ACCELERATE
from lockstep.compat.accelerate import (
    GATHERING,
    MODULES,
    NOT_OFFERED,
    REFUSED,
    NotOffered,
    Offered,
)

PAGE = Path(__file__).parents[1] / "docs" / "migrating-from-accelerate.md"
SHOWN = 6


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def quoted(words: Iterable[str], most: int = SHOWN) -> str:
    every = sorted(words)
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(f"`{word}`" for word in every[:most]) + rest


def modules() -> str:
    """Where the names of each module of Accelerate are, and how many of them."""
    rows = []
    for module, names in sorted(MODULES.items()):
        offered = [known for known in names.values() if isinstance(known, Offered)]
        left_out = [name for name, known in names.items() if isinstance(known, NotOffered)]
        if names and not (module == GATHERING and not offered):
            here = quoted({known.module for known in offered}, 3)
            if module == GATHERING:
                here = "`lockstep.utils`: the names of all modules below it"
                left_out = []
            rows.append([f"`{module}`", here or "none", f"{len(offered)}", quoted(left_out, 4)])
    return table(["module", "Lockstep", "names", "left out"], rows)


def reasons() -> str:
    """Why names are left out."""
    rows = []
    for reason, by_module in NOT_OFFERED.items():
        names = {name for text in by_module.values() for name in text.split()}
        rows.append([quoted(names), reason[:1].upper() + reason[1:]])
    return table(["not offered", "why, and what to use"], rows)


def commands() -> str:
    """Accelerate's commands."""
    rows = []
    for name, (_, text) in COMMANDS_OF_ACCELERATE.items():
        alike = f"`lockstep {name}`, " if name in OWN_COMMANDS else ""
        rows.append([f"`accelerate {name}`", f"{alike}`lockstep accelerate {name}`", text])
    return table(["Accelerate", "Lockstep", "what it does"], rows)


def options() -> str:
    """Options of ``accelerate launch`` that are refused when they ask for something."""
    by_feature: dict[tuple[str, str], list[str]] = {}
    for name, (what, instead, _) in REFUSED.items():
        by_feature.setdefault((what, instead), []).append(name)
    return table(
        ["refused", "what they ask for", "what to do"],
        (
            [quoted(f"--{name}" for name in names), what, instead]
            for (what, instead), names in by_feature.items()
        ),
    )


BLOCKS = {"names": modules, "reasons": reasons, "commands": commands, "options": options}


def written(text: str) -> str:
    """The page with these tables."""
    for name, make in BLOCKS.items():
        block = re.compile(rf"(?<=<!-- {name} -->\n\n).*?(?=\n<!-- end of {name} -->)", re.DOTALL)
        assert block.search(text), name
        text = block.sub(lambda _, make=make: make(), text)
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
