"""Whole copies of a model on every rank, whose gradients are averaged."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if TYPE_CHECKING:
    from lockstep.parallel.ddp.apply import join_replicas as join_replicas
else:
    __getattr__ = names_of_modules(
        __name__,
        {
            "apply": ["gradient_hook", "join_replicas"],
        },
    )
