"""Changes of this process's environment that end with a block, and truth values in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.config.sources import export_environment, inherited_environment, restore_environment
from lockstep.config.values import parse_bool


@contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Set environment variables inside the block: names in upper case, values as text."""
    before = inherited_environment()
    names = [name.upper() for name in variables]
    export_environment({name: str(value) for name, value in zip(names, variables.values(), strict=True)})
    try:
        yield
    finally:
        after = {name: value for name, value in inherited_environment().items() if name not in names}
        restore_environment(after | {name: before[name] for name in names if name in before})


@contextmanager
def clear_environment() -> Iterator[None]:
    """No environment variables inside the block; afterwards those from before."""
    before = inherited_environment()
    restore_environment({})
    try:
        yield
    finally:
        restore_environment(before)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 or 0 (True or False with ``to_bool``) for words such as ``yes`` and ``off``.

    Raises:
        ValueError: another word.
    """
    truth = parse_bool(value, "value")
    return truth if to_bool else int(truth)
