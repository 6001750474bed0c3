"""Where a run's numbers go: TensorBoard, JSON lines, hosted services, the user's own classes."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if TYPE_CHECKING:
    from lockstep.observe.trackers.run import TrackerSet as TrackerSet
else:
    __getattr__ = names_of_modules(
        __name__,
        {
            "run": ["available_trackers", "resolve_trackers", "TRACKERS", "TrackerSet"],
        },
    )
