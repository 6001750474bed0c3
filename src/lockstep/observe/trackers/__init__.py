"""Where a run's numbers go: TensorBoard, JSON lines, hosted services, the user's own classes."""

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.observe.trackers.run import TrackerSet as TrackerSet
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "TrackerSet": "lockstep.observe.trackers.run",
        },
    )
