"""Names that scripts import from ``accelerate.tracking``."""

from __future__ import annotations

from lockstep.observe.trackers.base import GeneralTracker, on_main_process
from lockstep.observe.trackers.clearml import ClearMLTracker
from lockstep.observe.trackers.hosted import CometMLTracker, SwanLabTracker, TrackioTracker, WandBTracker
from lockstep.observe.trackers.local import JSONLinesTracker, TensorBoardTracker
from lockstep.observe.trackers.mlflow import MLflowTracker
from lockstep.observe.trackers.repositories import AimTracker, DVCLiveTracker
from lockstep.observe.trackers.run import (
    LOGGER_TYPE_TO_CLASS,
    register_tracker_class,
)
from lockstep.observe.trackers.run import available_trackers as get_available_trackers

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JSONLinesTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
