"""What is known of a run while objects are prepared for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.comm.collectives import Communicator
from lockstep.config.options import Options
from lockstep.observe.measures.measures import Measures
from lockstep.runtime.mesh import DeviceMeshes
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import StepState
from lockstep.train.loss_scale import LossScaler


@dataclass
class RunContext:
    """What one ``Accelerator`` hands to all that prepares objects. Only ``options`` may change.

    Attributes:
        scaler: The loss scale of fp16; None with other precisions.
        device_placement: Whether models and batches are moved to this process's device.
        step_scheduler_with_optimizer: Whether schedulers advance only when their optimizer steps.
        ranks_step_together: Whether all ranks make this step with averaged gradients, unlike in asynchronous training.
    """

    options: Options
    runtime: Runtime
    meshes: DeviceMeshes
    step: StepState
    communicator: Communicator
    scaler: LossScaler | None
    device_placement: bool
    step_scheduler_with_optimizer: bool
    ranks_step_together: Callable[[], bool]
    measures: Measures
