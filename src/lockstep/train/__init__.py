from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "accumulation": ["Accumulation"],
            "clipping": ["clip_norm"],
            "scheduler": ["PreparedScheduler"],
            "sharded_optimizer": ["step_without_dispatch"],
            "weighting": ["WeightedMean"],
        },
    )
