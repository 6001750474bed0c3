"""Names that scripts import from ``accelerate.utils.deepspeed``. Sharding runs on torch's engine, not on DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.compat.deepspeed.hf_config import HfDeepSpeedConfig
from lockstep.compat.deepspeed.optimizers import DummyOptim, DummyScheduler
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.compat.deepspeed.plugin import DeepSpeedPlugin

__all__ = [
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
]


def get_active_deepspeed_plugin(state: object) -> DeepSpeedPlugin:
    """Return the DeepSpeed plugin of a run.

    Args:
        state: The state of the run: ``accelerator.state`` or ``AcceleratorState()``.

    Raises:
        ValueError: the run has no DeepSpeed plugin.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.utils import DeepSpeedPlugin, get_active_deepspeed_plugin

        plugin = DeepSpeedPlugin(zero_stage=2)
        accelerator = Accelerator(deepspeed_plugin=plugin)
        assert get_active_deepspeed_plugin(accelerator.state) is plugin
        ```
    """
    plugin = getattr(state, "deepspeed_plugin", None)
    if plugin is None:
        raise ValueError("This run has no DeepSpeed plugin. Pass deepspeed_plugin to Accelerator.")
    return plugin


class _OfDeepSpeedsEngine:
    """A class of which there are no instances here: ``isinstance`` says so, and making one is refused."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise UsageError(
            f"{type(self).__name__} wraps a part of DeepSpeed's engine, which is not used here. Use the objects "
            "that accelerator.prepare() returns."
        )


class DeepSpeedSchedulerWrapper(_OfDeepSpeedsEngine):
    """Accelerate's wrapper of DeepSpeed's scheduler. Here it has no instances; ``prepare`` returns a
    ``PreparedScheduler``.

    Raises:
        UsageError: when one is made.

    Examples:
        ```python
        from lockstep.utils import DeepSpeedSchedulerWrapper

        try:
            DeepSpeedSchedulerWrapper()
            raise AssertionError("one was made")
        except RuntimeError as error:
            print(error)  # use what accelerator.prepare() returns
        ```
    """
