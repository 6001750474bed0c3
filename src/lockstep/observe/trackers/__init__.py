"""Where a run's numbers go: TensorBoard, JSON lines, hosted services, the user's own classes."""

from __future__ import annotations

from lockstep.observe.trackers.base import BlankTracker, GeneralTracker, on_main_process
from lockstep.observe.trackers.clearml import ClearMLTracker
from lockstep.observe.trackers.hosted import (
    AimTracker,
    CometMLTracker,
    DVCLiveTracker,
    SwanLabTracker,
    TrackioTracker,
    WandBTracker,
)
from lockstep.observe.trackers.local import JSONLinesTracker, TensorBoardTracker
from lockstep.observe.trackers.mlflow import MLflowTracker
from lockstep.observe.trackers.run import (
    TRACKERS,
    TrackerSet,
    available_trackers,
    register_tracker_class,
    resolve_trackers,
)

__all__ = [
    "TRACKERS",
    "AimTracker",
    "BlankTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JSONLinesTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackerSet",
    "TrackioTracker",
    "WandBTracker",
    "available_trackers",
    "on_main_process",
    "register_tracker_class",
    "resolve_trackers",
]
