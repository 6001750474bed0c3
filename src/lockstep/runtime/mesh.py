"""Which ranks share a model's state, as torch's DeviceMesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.parallel import Parallel
from lockstep.runtime.process import Runtime

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def data_mesh(runtime: Runtime, parallel: Parallel) -> DeviceMesh:
    """The mesh of data parallel training: axis ``shard``, and before it ``replicate`` if there are several copies.

    Neighbouring ranks share a copy. Collective where ``replicate`` is above 1: it makes process groups.

    Raises:
        ConfigError: the world size cannot be divided as ``parallel`` says.
    """
    from torch.distributed.device_mesh import init_device_mesh

    size = parallel.shard_size(runtime.world_size)
    if parallel.replicate == 1:
        return init_device_mesh(runtime.device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        runtime.device.type, (parallel.replicate, size), mesh_dim_names=("replicate", "shard")
    )
