"""The one way to replace what code of the library reads from its module: by a public name that stands beside it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def module_of(public: Any) -> ModuleType:
    """The module that defines a function or class, wherever that is.

    Only for what no argument and no public object can change: ``monkeypatch.setattr(module_of(Rendezvous), ...)``.
    """
    return sys.modules[public.__module__]
