"""A call that is refused, on one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def expect_refusal(
    error: type[Exception], words: str, call: Callable[..., object], *args: Any, **options: Any
) -> None:
    """``call`` raises such an error. Its message has these words: the name, the number, or what to do."""
    with pytest.raises(error, match=re.escape(words)):
        call(*args, **options)
