"""What the scripts of this folder print: a line a case."""

from __future__ import annotations

import json
from typing import Any

import torch


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [
            str(value.dtype),
            str(value.device),
            list(value.shape),
            value.tolist() if not value.is_meta else None,
        ]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in (sorted(value, key=str) if isinstance(value, set) else value)]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def say(name: str, *values: Any) -> None:
    print(json.dumps([name, plain(values)]))


def refused(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return next(
            kind.__name__
            for kind in (KeyError, ImportError, ValueError, TypeError, RuntimeError, Exception)
            if isinstance(error, kind)
        )
    return "nothing"
