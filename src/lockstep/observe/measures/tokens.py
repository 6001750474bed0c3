"""Tokens of a batch: what is trained on, as the model sees it."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = ("input_ids", "tokens")
"""Entries of a batch that hold tokens."""


def tokens_in(batch: object) -> int | None:
    """Elements of the batch's ``input_ids`` (or ``tokens``), [batch, sequence] or of any shape; None: it has none.

    Padding counts: it costs what other tokens cost. So do rows that only complete a batch.
    """
    if isinstance(batch, Mapping):
        for name in NAMES:
            if name in batch:
                count = getattr(batch[name], "numel", None)
                return int(count()) if callable(count) else None
        return None
    if isinstance(batch, (list, tuple)):
        for part in batch:
            if isinstance(part, Mapping):
                return tokens_in(part)
        return None
    count = getattr(getattr(batch, "input_ids", None), "numel", None)
    return int(count()) if callable(count) else None
