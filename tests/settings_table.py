"""The table of settings in ``docs/reference/configuration.md``: ``python -m tests.settings_table`` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.config import TOPICS, Setting

PAGE = Path(__file__).parents[1] / "docs" / "reference/configuration.md"
BLOCK = re.compile(r"(?<=<!-- settings -->\n\n).*?(?=\n<!-- end of settings -->)", re.DOTALL)


def table() -> str:
    """One table for each topic, as in ``lockstep launch --help``."""
    parts = []
    for topic, settings in TOPICS.items():
        rows = "".join(f"| {' | '.join(cells(setting))} |\n" for setting in settings)
        parts.append(
            f"### {topic}\n\n| flag | key in a file | variable | meaning |\n|---|---|---|---|\n{rows}"
        )
    return "\n".join(parts)


def cells(setting: Setting) -> tuple[str, str, str, str]:
    flags = [flag.partition("/")[0] for flag in setting.flags.split()]  # of --watch/--no-watch the first
    longest_first = sorted(flags, key=lambda flag: not flag.startswith("--"))
    meaning = setting.meaning
    if setting.values and setting.values not in meaning.lower():
        note = (
            setting.values[:1].upper() + setting.values[1:] if not meaning else f"In a file: {setting.values}"
        )
        meaning = f"{meaning} {note}.".strip()
    elif not meaning:
        meaning = "A name that `torch.compile` knows."
    if setting.is_repeated:
        meaning += " May be repeated."
    return (
        ", ".join(f"`{flag}`" for flag in longest_first),
        f"`{setting.name}`" if setting.is_in_files else "",
        ", ".join(f"`{name}`" for name in setting.variables),
        meaning.replace("|", "\\|"),
    )


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
