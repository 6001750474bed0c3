"""All-reduce in a ring: every process gets the sum of all processes' tensors, and all send equally much.

    python examples/from_scratch/ring_all_reduce.py

The processes stand in a ring. Each sends to its right neighbour and receives from its left one. The tensor is cut
into N chunks. In N - 1 hops each process comes to own the sum of one chunk (reduce-scatter). In N - 1 more hops the
sums go round (all-gather).

Paper: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from world import Check, count, run, same, wire


def hop(outgoing: Tensor) -> Tensor:
    """Send a tensor to the right; return the one, of the same shape, that comes from the left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(outgoing)
    # Not send, then recv: if all processes wait in send, none of them receives.
    sending = dist.isend(outgoing.contiguous(), (rank + 1) % size)
    dist.recv(incoming, (rank - 1) % size)
    sending.wait()
    return incoming


def reduce_scatter(tensor: Tensor) -> Tensor:
    """This process's chunk of the sum of all tensors: [n] -> [n / N].

    N must divide n.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(tensor.view(size, -1))
    # Chunk c starts at the process to the right of its owner, and meets all others on
    # the way to it.
    partial = chunks[(rank - 1) % size]
    for step in range(1, size):
        partial = hop(partial) + chunks[(rank - 1 - step) % size]
    return partial


def all_gather(chunk: Tensor) -> Tensor:
    """All processes' chunks, one after the other: [n / N] -> [n]."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = [chunk] * size
    for step in range(1, size):
        # What came in the last hop goes on in this one.
        chunk = hop(chunk)
        chunks[(rank - step) % size] = chunk
    return torch.cat(chunks)


def all_reduce(tensor: Tensor) -> Tensor:
    """The sum of all processes' tensors, in the same shape.

    The inputs stay as they are.
    """
    flat = padded(tensor)
    return all_gather(reduce_scatter(flat))[: tensor.numel()].view_as(tensor)


def padded(tensor: Tensor) -> Tensor:
    """The tensor as one row, with zeros at the end so that it can be cut into N equal chunks."""
    size = dist.get_world_size()
    flat = tensor.flatten()
    return torch.cat([flat, flat.new_zeros(-flat.numel() % size)])


def demo(length: int = 1_000_000) -> list[Check]:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.randn(length, generator=torch.Generator().manual_seed(other)) for other in range(size)]
    mine = tensors[rank]

    with wire() as scattered:
        chunk = reduce_scatter(mine)
    with wire() as gathered:
        whole = all_gather(chunk)

    expected = torch.stack(tensors).sum(0)
    torchs = mine.clone()
    dist.all_reduce(torchs)
    phase = (size - 1) / size * mine.nbytes
    return [
        same("the sum, beside one process", [whole], [expected], within=1e-5),
        same("the sum, beside torch's all_reduce", [whole], [torchs], within=1e-5),
        count("bytes sent in reduce-scatter: (N - 1) / N", scattered.bytes, phase),
        count("bytes sent in all-gather: (N - 1) / N", gathered.bytes, phase),
        count("messages sent: 2 (N - 1)", scattered.messages + gathered.messages, 2 * (size - 1)),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
