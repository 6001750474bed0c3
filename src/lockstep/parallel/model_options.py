"""The options of an ``Accelerator``, and what else the steps of ``parallelize`` use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.config.options import Options
from lockstep.parallel.materialize import InitWeights
from lockstep.runtime.mesh import DeviceMeshes


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The options of an ``Accelerator``, as one object for all steps that make a model ready.

    ``loss_scale``: the factor of losses now, with fp16.
    """

    meshes: DeviceMeshes
    init_weights: InitWeights | None = None
    loss_scale: Callable[[], float] | None = None
