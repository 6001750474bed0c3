"""Optimizers whose state, and gradients, rest outside of the device: their step, block by block, in the background."""

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.offload.optimizer.gradients import norm_of as norm_of
    from lockstep.offload.optimizer.gradients import scale_offloaded as scale_offloaded
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "norm_of": "lockstep.offload.optimizer.gradients",
            "scale_offloaded": "lockstep.offload.optimizer.gradients",
        },
    )
