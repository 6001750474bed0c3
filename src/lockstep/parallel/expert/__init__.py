"""Mixture of experts, on one device or with the experts spread over ranks."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules
from lockstep.parallel.expert.apply import expert_parallel, share_routing
from lockstep.parallel.expert.layer import MixtureOfExperts, load_balance_loss, router_z_loss

__all__ = [
    "MixtureOfExperts",
    "expert_parallel",
    "load_balance_loss",
    "router_z_loss",
    "share_routing",
]

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "collectives": ["SumOverRanks"],
            "router": ["count_choices", "kept_slots", "Routing", "traffic", "within_capacity"],
        },
    )
