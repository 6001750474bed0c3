"""Names that scripts import from ``accelerate.tracking``."""

from lockstep.observe.trackers.base import GeneralTracker, on_main_process
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

__all__ = [
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
    "on_main_process",
]
