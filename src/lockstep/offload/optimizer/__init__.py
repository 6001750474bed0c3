"""Optimizers whose state, and gradients, rest outside of the device: their step, block by block, in the background."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if TYPE_CHECKING:
    from lockstep.offload.optimizer.clipping import norm_of as norm_of
    from lockstep.offload.optimizer.clipping import scale_offloaded as scale_offloaded
else:
    __getattr__ = names_of_modules(
        __name__,
        {
            "attach": ["HOOK_READS_NOTHING", "offload_step"],
            "clipping": ["norm_of", "scale_offloaded"],
            "gradients": ["GradientFile"],
            "offloaded": ["OffloadedStep"],
        },
    )
