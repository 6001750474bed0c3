"""gloo: a fault in torch's own part of it, and the way around it.

Each gloo group has two threads that carry out collectives. Behind each, the thread writes the name of what it did into
one string of the group, which no lock guards. Names of up to 15 letters lie in the string itself; a longer one has
memory of its own, and two threads that write at once free it twice, or write into it when it is freed: the process
ends with "malloc(): unaligned tcache chunk detected" or a segmentation fault, or goes on with whatever was overwritten.
Of what gloo does, two have a longer name. ALLGATHER_COALESCED is how torch carries out the all-gather of functional
collectives, which DTensors and tensor parallelism are made of, also where it gathers a single tensor. The other is
_ALLREDUCE_SPARSE.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.torch_internals.versions import expect, probed

NAMESPACE = "_c10d_functional"
GATHERS = {
    "all_gather_into_tensor": ["input", "group_size", "group_name"],
    "all_gather_into_tensor_coalesced": ["inputs", "group_size", "group_name"],
    "all_gather_into_tensor_out": ["input", "group_size", "group_name", "out"],
}


@functools.cache
def gather_under_a_short_name() -> torch.library.Library:
    """Let functional all-gathers of CPU tensors run as the plain all-gather, in this process from now on.

    The same bytes, in the same order; several tensors are gathered one by one. Functions that gloo runs for another
    reason are left as they are. What is returned keeps it so.

    Relies on: the operators of ``GATHERS``, and that a kernel for CPU tensors goes before theirs for every device.
    """
    kernels = torch.library.Library(NAMESPACE, "IMPL")
    kernels.impl("all_gather_into_tensor", all_gather, "CPU")
    kernels.impl("all_gather_into_tensor_coalesced", all_gather_each, "CPU")
    return kernels


def all_gather(input: Tensor, group_size: int, group_name: Any) -> Tensor:
    """The ranks' tensors, concatenated along the first dimension. As in torch, to be waited for."""
    input = input.contiguous()
    if input.is_complex():  # gloo has no complex numbers
        return torch.view_as_complex(all_gather(torch.view_as_real(input), group_size, group_name))
    first, *others = input.shape or (1,)
    gathered = input.new_empty([first * group_size, *others])
    # Flat, as a tensor without dimensions cannot be told from the gathered ones.
    send = getattr(torch.ops, NAMESPACE).all_gather_into_tensor_out
    send(input.view(-1), group_size, group_name, out=gathered.view(-1))
    return gathered


def all_gather_each(inputs: list[Tensor], group_size: int, group_name: Any) -> list[Tensor]:
    """``all_gather`` of each."""
    return [all_gather(tensor, group_size, group_name) for tensor in inputs]


@probed("gloo", "gathers")
def probe() -> None:
    """Look at the operators; nothing is sent."""
    if not dist.is_available():
        return
    import torch.distributed._functional_collectives  # registers them

    for name, arguments in GATHERS.items():
        schema = getattr(getattr(torch.ops, NAMESPACE), name).default._schema
        expect([argument.name for argument in schema.arguments] == arguments, f"the arguments of {name}")
