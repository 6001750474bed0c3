"""gloo: a part of torch's own that some collectives of CPU tensors keep away from.

In torch 2.11 to 2.15, memory of a process may be damaged while gloo carries out functional all-gathers or sums of
sparse tensors. So all-gathers run as the plain one, which has the same result, and sparse gradients are averaged in a
group with one thread.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.torch_internals import c10d
from lockstep.torch_internals.c10d import CPU
from lockstep.torch_internals.versions import expect, probed

NAMESPACE = "_c10d_functional"
GATHERS = {
    "all_gather_into_tensor": ["input", "group_size", "group_name"],
    "all_gather_into_tensor_coalesced": ["inputs", "group_size", "group_name"],
    "all_gather_into_tensor_out": ["input", "group_size", "group_name", "out"],
}


@functools.cache
def gather_as_the_plain_one() -> torch.library.Library:
    """Let functional all-gathers of CPU tensors run as the plain all-gather, in this process from now on.

    The same bytes, in the same order; several tensors are gathered one by one. Functions that gloo runs for another
    reason are left as they are. What is returned keeps it so.

    Relies on: the operators of ``GATHERS``, and that a kernel for CPU tensors goes before theirs for every device.
    """
    kernels = torch.library.Library(NAMESPACE, "IMPL")
    kernels.impl("all_gather_into_tensor", all_gather, "CPU")
    kernels.impl("all_gather_into_tensor_coalesced", all_gather_each, "CPU")
    kernels.impl("all_gather_into_tensor_out", all_gather_out, "CPU")
    return kernels


def all_gather(input: Tensor, group_size: int, group_name: object) -> Tensor:
    """Return the ranks' tensors [n, ...], concatenated to [n * group_size, ...]. As in torch, to be waited for."""
    input = input.contiguous()
    # gloo has no complex numbers.
    if input.is_complex():
        return torch.view_as_complex(all_gather(torch.view_as_real(input), group_size, group_name))
    first, *others = input.shape or (1,)
    gathered = input.new_empty([first * group_size, *others])
    # Flat, as a tensor without dimensions cannot be told from the gathered ones.
    all_gather_out(input.view(-1), group_size, group_name, out=gathered.view(-1))
    return gathered


def all_gather_out(input: Tensor, group_size: int, group_name: object, *, out: Tensor) -> Tensor:
    """Gather into a flat tensor [n * group_size] that is there.

    Groups written in Python are reached as well, unlike from C++.
    """
    group = c10d.group_named(str(group_name))
    c10d.register_work(out, group._allgather_base(out, input))
    return out


def all_gather_each(inputs: list[Tensor], group_size: int, group_name: object) -> list[Tensor]:
    """Gather each tensor [n, ...]."""
    return [all_gather(tensor, group_size, group_name) for tensor in inputs]


def carries(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a group (None: the main one) communicates tensors of the device through gloo."""
    return isinstance(c10d.backend_of(group, device), dist.ProcessGroupGloo)


def group_with_one_thread() -> dist.ProcessGroup:
    """Return a new group of all ranks for CPU tensors, whose collectives run one after the other. Collective.

    Relies on: ``new_group`` makes what ``distributed_c10d`` calls ``ProcessGroupGloo``; that takes ``_Options``.
    """
    main = c10d.backend_of(None, CPU).options

    class OneThread(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: object) -> None:
            options = options_of_gloo()
            options._devices, options._timeout, options._threads = main._devices, timeout, 1
            super().__init__(store, rank, size, options)

    with mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", OneThread):
        return dist.new_group(backend="gloo", timeout=main._timeout)


def options_of_gloo() -> Any:
    """Relies on: ``_Options`` with ``_devices``, ``_timeout`` and ``_threads``."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo._Options()


@probed("gloo", "gathers")
def probe() -> None:
    """Look at the operators and options; nothing is sent."""
    if not dist.is_available():
        return
    # The import registers the operators.
    import torch.distributed._functional_collectives

    for name, arguments in GATHERS.items():
        schema = getattr(getattr(torch.ops, NAMESPACE), name).default._schema
        expect([argument.name for argument in schema.arguments] == arguments, f"the arguments of {name}")
    if dist.is_gloo_available():
        for name in ("_devices", "_timeout", "_threads"):
            expect(hasattr(options_of_gloo(), name), f"the option {name}")
