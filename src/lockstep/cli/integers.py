"""Integers on the command line."""

from __future__ import annotations

from typing import Any

import click


class IntegerRange(click.IntRange):
    """An integer within bounds, in the digits 0 to 9: ``int()`` also reads ``1_0`` and digits of other scripts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        digits = value.removeprefix("-") if isinstance(value, str) else "0"
        if not (digits.isascii() and digits.isdecimal()) or len(digits) > 18:
            self.fail(f"{value[:40]!r} is not a valid integer.", param, ctx)
        return super().convert(value, param, ctx)
