"""What ``prepare`` does with models, optimizers, loaders and schedulers, and what the front asks of them then."""

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.preparation.prepare import Preparation as Preparation
    from lockstep.preparation.window import AccumulationState as AccumulationState
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "AccumulationState": "lockstep.preparation.window",
            "Preparation": "lockstep.preparation.prepare",
        },
    )
