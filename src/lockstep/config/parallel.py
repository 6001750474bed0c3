"""How a model is spread, as one word: ``Accelerator(parallel=...)``."""

from __future__ import annotations

import difflib
from enum import Enum

from lockstep.errors import ConfigError


class Strategy(str, Enum):
    """``AUTO``: one process trains alone, several use DistributedDataParallel."""

    AUTO = "auto"
    DDP = "ddp"
    DATA_PARALLEL = "dataparallel"

    @classmethod
    def parse(cls, text: str | Strategy | None) -> Strategy:
        """The strategy of this name.

        Raises:
            ConfigError: no such strategy.
        """
        if text is None:
            return cls.AUTO
        names = [strategy.value for strategy in cls]
        if text not in names:
            close = difflib.get_close_matches(str(text), names, 1)
            hint = f"Did you mean '{close[0]}'?" if close else f"Use one of {', '.join(names)}."
            raise ConfigError(f"parallel={text!r} is not a known strategy. {hint}")
        return cls(text)
