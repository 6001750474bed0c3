"""ZeRO: parameters, gradients and optimizer states sharded over ranks, on torch's ``fully_shard``."""
