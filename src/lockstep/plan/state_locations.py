"""Where each part of a training state rests under ``offload``: one table, which the formulas and the docs read."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.enums import Offload, StringEnum
from lockstep.config.parallel import Parallel


class StateLocation(StringEnum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class StateLocations:
    """Where parts of the state are from one step to the next.

    ``copies``: the fp32 weights that are stepped on the host, where those on the device are others.
    """

    weights: StateLocation = StateLocation.DEVICE
    gradients: StateLocation = StateLocation.DEVICE
    optimizer: StateLocation = StateLocation.DEVICE
    copies: StateLocation | None = None


# offload -> weights, gradients, optimizer, copies; HOME is what offload_to says
HOME = None
TABLE: dict[Offload, tuple[StateLocation | None, StateLocation | None, StateLocation | None, bool]] = {
    Offload.NONE: (StateLocation.DEVICE, StateLocation.DEVICE, StateLocation.DEVICE, False),
    Offload.OPTIMIZER: (StateLocation.DEVICE, StateLocation.DEVICE, HOME, True),
    Offload.PARAMS: (HOME, HOME, StateLocation.HOST, False),
    Offload.ALL: (HOME, HOME, HOME, False),
}


def state_locations(parallel: Parallel) -> StateLocations:
    """Where the state of a model spread like this rests, with an accelerator as the device."""
    home = StateLocation.HOST if parallel.offload_folder is None else StateLocation.DISK
    weights, gradients, optimizer, copies = TABLE[parallel.offload]
    return StateLocations(weights or home, gradients or home, optimizer or home, home if copies else None)
