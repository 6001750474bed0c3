from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "collectives": ["all_reduce_max", "Communicator"],
            "dtensor": ["local", "regions_of", "shard_like", "total_norm", "whole"],
            "exchange": ["all_gather_into_tensor", "reduce_scatter_tensor"],
            "layout": ["local_regions", "local_shape", "ShardRegion"],
            "counter": ["CommCounter"],
            "quantization": ["dequantize", "from_message", "message_bytes", "quantize", "to_message"],
            "tree": [
                "concatenate",
                "find_batch_size",
                "leaves",
                "listify",
                "map_leaves",
                "map_tensors",
                "mover",
                "send_to_device",
                "tensor_leaves",
                "to_float32",
            ],
        },
    )
