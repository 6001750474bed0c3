"""Where a run's numbers go: TensorBoard, JSON lines, hosted services, the user's own classes."""

from __future__ import annotations

from lockstep.watch.trackers.base import BlankTracker, GeneralTracker, on_main_process
from lockstep.watch.trackers.clearml import ClearMLTracker
from lockstep.watch.trackers.hosted import (
    AimTracker,
    CometMLTracker,
    DVCLiveTracker,
    SwanLabTracker,
    TrackioTracker,
    WandBTracker,
)
from lockstep.watch.trackers.local import JSONLinesTracker, TensorBoardTracker
from lockstep.watch.trackers.mlflow import MLflowTracker
from lockstep.watch.trackers.run import (
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
