"""Hooks that this package puts on a user's modules."""

from __future__ import annotations

from collections.abc import Callable


class UncopiedHook:
    """Copies and pickles of the module lose it: what is left of it there does nothing."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _copy_of_hook, ()


def _copy_of_hook() -> Callable[..., None]:
    return _ignore


def _ignore(*args: object, **kwargs: object) -> None:
    pass
