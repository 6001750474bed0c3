"""Names that scripts import from ``accelerate.tracking``."""

from lockstep.watch.trackers.base import GeneralTracker, on_main_process
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
