"""One tensor from one rank to another."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.comm.collectives import Communicator, as_bytes


@torch.no_grad()
def transfer(
    tensor: torch.Tensor | None,
    like: torch.Tensor,
    from_process: int,
    to_process: int,
    communicator: Communicator,
) -> torch.Tensor | None:
    """``tensor`` of rank ``from_process`` on rank ``to_process``, in host memory; None on the others.

    Both ranks call it, others may. ``like`` has its shape and dtype, maybe on the meta device.
    """
    rank, group = communicator.runtime.rank, communicator._group
    if rank not in (from_process, to_process):
        return None
    if from_process == to_process:
        return None if tensor is None else tensor.detach().cpu()
    if rank == from_process:
        assert tensor is not None
        data = as_bytes(communicator._carried(tensor.detach()))
        if data.numel():
            dist.send(data, group=group, group_dst=to_process)
        return None
    data = torch.empty(like.nbytes, dtype=torch.uint8)
    carried = communicator._carried(data)
    if data.numel():
        dist.recv(carried, group=group, group_src=from_process)
    return carried.cpu().view(like.dtype).view(like.shape)
