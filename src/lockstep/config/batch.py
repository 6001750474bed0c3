"""The three numbers of a batch: global = per process x accumulation x processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config.values import SettingValue
from lockstep.errors import ConfigError

NAMES = ("train_batch_size", "micro_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class BatchSizes:
    """``micro``: rows of a process's batch; ``accumulation``: batches in a step; ``train``: rows of a step over all.

    None: not said. ``sources`` are for messages.
    """

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, SettingValue]) -> BatchSizes:
        """From the settings that were said."""
        said = [settings[name] for name in NAMES if name in settings]
        train, micro, accumulation = (settings[name].value if name in settings else None for name in NAMES)
        return cls(train, micro, accumulation, tuple(item.source for item in said))

    def solved(self, world_size: int, ranks: str = "processes") -> BatchSizes:
        """With what follows for so many processes, which messages call ``ranks``; what does not follow stays None.

        Raises:
            ConfigError: the numbers do not fit; the message has the arithmetic.
        """
        train, micro, accumulation = self.train, self.micro, self.accumulation
        if train is None:
            return self
        if micro is None:
            accumulation = accumulation or 1
            micro = train // (accumulation * world_size)
        elif accumulation is None:
            accumulation = train // (micro * world_size)
        product = micro * accumulation * world_size
        if product != train:
            raise ConfigError(self._message(world_size, ranks))
        return BatchSizes(train, micro, accumulation, self.sources)

    def _message(self, world_size: int, ranks: str) -> str:
        known = [
            f"{value} {what}"
            for value, what in (
                (self.micro, "rows a process"),
                (self.accumulation or (None if self.micro else 1), "accumulation steps"),
                (world_size, ranks),
            )
            if value is not None
        ]
        divisor = (self.micro or 1) * (self.accumulation or 1) * world_size
        arithmetic = " x ".join(known) + f" = {divisor}"
        if self.micro is None or self.accumulation is None:
            relation = f"{self.train} does not divide by {arithmetic}"
        else:
            relation = f"{arithmetic}, not {self.train}"
        return (
            f"the batch sizes do not fit: {', '.join(self.sources)}; {relation}. "
            "Correct one of them, or set it to 'auto'."
        )
