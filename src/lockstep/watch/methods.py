"""What a script writes down of a run, as methods of ``Accelerator``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lockstep.config.handlers import ProfileKwargs
from lockstep.config.options import Options
from lockstep.runtime.process import Runtime
from lockstep.watch.profile import build_profiler
from lockstep.watch.trackers.run import TrackerSet


class TrackingMethods:
    """Methods that need the trackers."""

    runtime: Runtime
    _options: Options
    _trackers: TrackerSet

    @property
    def trackers(self) -> list[Any]:
        return self._trackers.trackers

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers named by ``log_with`` and store the run's configuration."""
        self._trackers.start(project_name, config, init_kwargs)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Send values to all trackers; on other ranks than 0 nothing happens."""
        self._trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of this name, or with ``unwrap`` its library's own run object."""
        return self._trackers.get(name, unwrap)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """``torch.profiler`` around the block."""
        return build_profiler(profile_handler or self._options.profile, self.runtime)
