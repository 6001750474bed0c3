"""A call that is refused, on one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def expect_refusal(
    error: type[Exception], words: str, call: Callable[..., object], *args: Any, **options: Any
) -> str:
    """``call`` raises such an error. Its message, which is returned, has these words: a name, a number, what to do."""
    with pytest.raises(error, match=re.escape(words)) as caught:
        call(*args, **options)
    return str(caught.value)
