"""Names that scripts import from ``accelerate.tracking``."""

from __future__ import annotations

import os

from lockstep.observe.trackers.base import GeneralTracker, on_main_process
from lockstep.observe.trackers.clearml import ClearMLTracker
from lockstep.observe.trackers.hosted import CometMLTracker, SwanLabTracker, TrackioTracker, WandBTracker
from lockstep.observe.trackers.local import JSONLinesTracker, TensorBoardTracker
from lockstep.observe.trackers.mlflow import MLflowTracker
from lockstep.observe.trackers.repositories import AimTracker, DVCLiveTracker
from lockstep.observe.trackers.run import (
    LOGGER_TYPE_TO_CLASS,
    TrackerChoice,
    register_tracker_class,
    resolve_trackers,
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
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]


def filter_trackers(
    log_with: object, logging_dir: str | os.PathLike[str] | None = None
) -> list[TrackerChoice]:
    """Return the trackers that ``log_with`` means, as classes or objects.

    Args:
        log_with: None, a name, a ``LoggerType``, a tracker, a class of trackers, ``"all"``, or a list of these.
        logging_dir: The folder of trackers that write files.

    Raises:
        ConfigError: a name is unknown, or a tracker writes files and ``logging_dir`` is None.
        MissingExtraError: the package of a tracker is not installed.

    Examples:
        ```python
        from lockstep.tracking import filter_trackers

        assert len(filter_trackers(["jsonl"], logging_dir="logs")) == 1
        ```
    """
    return resolve_trackers(log_with, logging_dir)
