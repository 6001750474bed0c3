"""The exceptions of Lockstep, as a small tree.

    LockstepError
    ├── ConfigError (ValueError)
    ├── UsageError (RuntimeError)
    │   ├── ArgumentError (ValueError)
    │   └── StateResetError (AttributeError)
    ├── CollectiveMismatchError (RuntimeError)
    ├── CheckpointError (RuntimeError)
    │   └── NoCheckpointError (ValueError)
    ├── DamageError (RuntimeError)
    ├── OffloadError (RuntimeError)
    ├── ControlError (RuntimeError)
    └── MissingExtraError (ImportError)

Every message is one sentence on what is wrong, with the numbers, and one on what to do.
"""

from __future__ import annotations

from lockstep.distribution import install_command


class LockstepError(Exception):
    """Base of every exception that Lockstep raises on purpose.

    ``caused_by_rank``: the rank whose failure this one only follows; None where it is the cause.
    """

    caused_by_rank: int | None = None


class ConfigError(LockstepError, ValueError):
    """A setting is unknown, malformed, out of range or contradicts another one."""


class UsageError(LockstepError, RuntimeError):
    """The library was called in an order or with objects that cannot give a correct result."""


class ArgumentError(UsageError, ValueError):
    """A ``UsageError`` of one argument, which scripts written for Accelerate catch as ``ValueError``."""


class StateResetError(UsageError, AttributeError):
    """What an ``Accelerator`` was made for has been forgotten. Scripts for Accelerate catch ``AttributeError``."""


class CollectiveMismatchError(LockstepError, RuntimeError):
    """Ranks entered one collective with different operations, structures, shapes or dtypes."""


class CheckpointError(LockstepError, RuntimeError):
    """A checkpoint is missing, incomplete or does not fit what it is loaded into."""


class NoCheckpointError(CheckpointError, ValueError):
    """There is no checkpoint where one was looked for. Scripts written for Accelerate catch it as ``ValueError``."""


class DamageError(LockstepError, RuntimeError):
    """Parameters differ among ranks that must hold the same, or gradients are no finite numbers."""


class SpikeError(LockstepError, RuntimeError):
    """The loss or the gradient norm of a step is far above that of the steps before it, or not finite."""


class OffloadError(LockstepError, RuntimeError):
    """Weights, gradients or optimizer state do not fit where they were to be kept, or cannot be read from there."""


class ControlError(LockstepError, RuntimeError):
    """A launcher or worker of the run cannot be reached, is gone, or did not prove that it belongs to the run."""


class MissingExtraError(LockstepError, ImportError):
    """An optional dependency is needed that is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package '{package}', which is not installed. "
            f"Install it with: {install_command(extra)}"
        )
