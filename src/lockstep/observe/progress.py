"""A progress bar that appears once per machine, not once per process."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm as bar

from lockstep.errors import ConfigError
from lockstep.runtime import process


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> object:
    """``tqdm.auto.tqdm(*args, **kwargs)``, disabled except on the local main process.

    With ``main_process_only=False`` every process shows its bar. Without a started runtime this
    process counts as the main one.

    Raises:
        ConfigError: when the first argument is a bool, which would be taken for an iterable.
    """
    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"The first argument of tqdm is {args[0]}, but must be the iterable. "
            f"Write tqdm(..., main_process_only={args[0]})."
        )
    runtime = process.current()
    if main_process_only and runtime is not None and not runtime.is_local_main:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
