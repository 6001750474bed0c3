"""The parts of an ``Accelerator`` that its methods in several files share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.comm.collectives import Communicator
from lockstep.config.options import Options
from lockstep.runtime.mesh import DeviceMeshes
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import StepState

if TYPE_CHECKING:
    from lockstep.observe.measures.measures import Measures
    from lockstep.preparation.prepare import Preparation
    from lockstep.train.accumulation import Accumulation
    from lockstep.train.loss_scale import LossScaler


class AcceleratorParts:
    """Declares them for the type checker: ``Accelerator`` makes them."""

    runtime: Runtime
    _options: Options
    _step: StepState
    _scaler: LossScaler | None

    # Each is made when it is first used.
    if TYPE_CHECKING:

        @property
        def meshes(self) -> DeviceMeshes: ...
        @property
        def measures(self) -> Measures: ...
        @property
        def is_main_process(self) -> bool: ...
        @property
        def _communicator(self) -> Communicator: ...
        @property
        def _data_communicator(self) -> Communicator: ...
        @property
        def _preparation(self) -> Preparation: ...
        @property
        def _accumulation(self) -> Accumulation: ...
