"""Loggers and progress bars that know their rank: once per run, once per machine, on every rank, or rank by rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.runtime import process

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class MultiProcessAdapter(_Adapter):
    """A logger that knows the ranks. ``get_logger`` makes it.

    ``debug``, ``info`` and the other methods take two more arguments:

    - ``main_process_only`` (default True): log on rank 0 only.
    - ``in_order`` (default False): log on every rank, one after the other. Every rank must make the call.

    Records begin with the rank. Before an ``Accelerator`` or ``PartialState`` exists, the process counts as rank 0.

    Args:
        logger: The logger of Python's ``logging``.
        extra: Values that each record carries, as in ``logging.LoggerAdapter``.

    Examples:
        ```python
        import logging
        from lockstep import Accelerator
        from lockstep.logging import MultiProcessAdapter

        accelerator = Accelerator()
        logger = MultiProcessAdapter(logging.getLogger("training"))
        logger.warning("once, by rank 0")
        logger.warning("by each rank in turn", main_process_only=False, in_order=True)
        for _ in range(3):
            logger.warning_once("this only the first time")
        ```
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, object] | None = None) -> None:
        super().__init__(logger, extra or {})
        self._warned: set[tuple[str, str]] = set()

    def process(
        self, msg: object, kwargs: MutableMapping[str, object]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        msg, kwargs = super().process(msg, kwargs)
        # One frame more than the default: the caller of log(), not log() itself.
        kwargs.setdefault("stacklevel", 2)
        runtime = process.current_runtime()
        is_ours = self.logger.name.startswith("lockstep.")
        return (msg if runtime is None or is_ours else f"[RANK {runtime.rank}] {msg}"), kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: object) -> None:
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        runtime = process.current_runtime()
        msg, options = self.process(msg, kwargs)
        if runtime is None or (in_order and runtime.world_size == 1):
            self.logger.log(level, msg, *args, **options)
        elif in_order:
            for rank in range(runtime.world_size):
                if rank == runtime.rank:
                    self.logger.log(level, msg, *args, **options)
                _barrier()
        elif runtime.is_main or not main_process_only:
            self.logger.log(level, msg, *args, **options)

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning, but only the first time for the same message and arguments.

        Args:
            msg: The message.
            args: Values for the message, as in ``logging``.
            kwargs: Options, such as ``main_process_only``.
        """
        key = (str(msg), repr(args))
        if key not in self._warned:
            self._warned.add(key)
            kwargs.setdefault("stacklevel", 3)
            self.warning(msg, *args, **kwargs)


class _OwnLines(logging.Handler):
    """Writes what Lockstep logs like its other lines, if the script has set up no logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            sys.stderr.write(f"lockstep: {record.getMessage()}\n")


logging.getLogger("lockstep").addHandler(_OwnLines(logging.WARNING))


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger whose methods know the ranks; see ``MultiProcessAdapter``.

    Args:
        name: The name of the logger.
        log_level: The level, such as ``"INFO"``, of this logger and of the root logger. None: they are left as they
            are.

    Examples:
        ```python
        from lockstep import get_logger

        logger = get_logger(__name__, log_level="INFO")
        logger.info("once for all processes")
        logger.info("from each process", main_process_only=False)
        ```
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return MultiProcessAdapter(logger)


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> object:
    """Return a progress bar of the package tqdm that only local rank 0 of each machine shows.

    Before an ``Accelerator`` or ``PartialState`` exists, the process counts as local rank 0.

    Args:
        args: Positional arguments of ``tqdm.auto.tqdm``, such as the iterable.
        main_process_only: False: every process shows its bar.
        kwargs: Keyword arguments of ``tqdm.auto.tqdm``.

    Raises:
        ConfigError: the first argument is a bool. It would be taken for the iterable.

    Examples:
        ```python
        from lockstep import tqdm

        total = 0
        for step in tqdm(range(100), desc="training"):  # one bar, whatever the number of ranks
            total += step
        assert total == 4950
        ```
    """
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"The first argument of tqdm is {args[0]}, but must be the iterable to go through. Write tqdm(..., "
            f"main_process_only={args[0]})."
        )
    runtime = process.current_runtime()
    if main_process_only and runtime is not None and not runtime.is_local_main:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
