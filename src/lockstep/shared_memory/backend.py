"""How torch gets to know the backend of shared memory."""

from __future__ import annotations

import torch.distributed as dist

from lockstep.config.enums import CPUBackend
from lockstep.torch_internals import c10d


def register() -> None:
    """Let torch know the backend, once a process. What it is made of is imported with the first group."""
    if CPUBackend.SHM.value not in dist.Backend.backend_list:
        dist.Backend.register_backend(CPUBackend.SHM.value, _make_group, extended_api=True, devices=["cpu"])
        # Its calls are in ``history``, not in torch's flight recorder.
        c10d.records_itself(CPUBackend.SHM.value)


def _make_group(options: object, _: object = None) -> object:
    from lockstep.shared_memory.join import make_group

    return make_group(options)
