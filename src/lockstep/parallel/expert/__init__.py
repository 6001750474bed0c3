"""Mixture of experts, on one device or with the experts spread over ranks."""

from lockstep.parallel.expert.apply import expert_parallel, share_routing
from lockstep.parallel.expert.layer import MixtureOfExperts, load_balance_loss, router_z_loss

__all__ = [
    "MixtureOfExperts",
    "expert_parallel",
    "load_balance_loss",
    "router_z_loss",
    "share_routing",
]
