"""ZeRO: parameters, gradients and optimizer states sharded over ranks, on torch's ``fully_shard``."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "exchange": [
                "BroadcastAllGather",
                "ExchangeReduceScatter",
                "quantize_collectives",
                "QuantizedAllGather",
                "QuantizedReduceScatter",
            ],
            "groups": ["find_groups"],
            "sharding": ["Sharding"],
        },
    )
