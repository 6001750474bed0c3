"""Whole copies of a model on every rank, whose gradients are averaged."""

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.parallel.ddp.apply import join_replicas as join_replicas
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "join_replicas": "lockstep.parallel.ddp.apply",
        },
    )
