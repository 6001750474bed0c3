"""Texts that a file may hold, as they can be shown."""

from __future__ import annotations

LONGEST = 4000
"""Characters of a text that is shown; what is longer is cut."""


def plain_text(value: object, limit: int = LONGEST) -> str:
    """Any value on one line, without control characters, cut at ``limit`` characters."""
    text = value if isinstance(value, str) else _repr(value)
    text = "".join(
        one if one.isprintable() else " " if one in "\n\t" else "?" for one in text[: limit + 1].strip()
    )
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _repr(value: object) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):  # integers of thousands of digits
        return "?"
