"""What ``prepare`` does with models, optimizers, loaders and schedulers, and what the front asks of them then."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if TYPE_CHECKING:
    from lockstep.preparation.prepare import Preparation as Preparation
    from lockstep.preparation.run_context import RunContext as RunContext
    from lockstep.preparation.window import AccumulationState as AccumulationState
else:
    __getattr__ = names_of_modules(
        __name__,
        {
            "checks": ["check_backend"],
            "gradients": ["OwnGradients"],
            "prepare": ["Preparation"],
            "run_context": ["RunContext"],
            "window": ["AccumulationState"],
        },
    )
