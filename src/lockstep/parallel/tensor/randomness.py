"""Random numbers that are equal on all ranks of a tensor-parallel group, or different on each, where they must be.

Dropout of a tensor that every rank holds whole needs the same mask on all ranks, or they would go on with
different numbers. Dropout of parts (attention weights of a rank's heads, hidden features, a chunk of the
sequence) needs another mask on each rank. So:

- A forward of the model in training begins with a seed that the group's first rank draws: whatever the
  ranks' own seeds are, they agree. It costs a broadcast of 8 bytes, and only where the model drops.
- What works on parts draws a seed from the stream that all ranks share, and adds the rank to it; the stream
  goes on behind it where it was.

All state is in torch's own generators, so that what recomputes a block (with the generators as they were)
repeats its masks, and a resumed run repeats those of an uninterrupted one.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from lockstep.torch_internals import modules as torch_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LARGEST = 2**62


class Stream:
    """What generators were as a forked stream began; ``close`` continues there."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._cpu = torch.get_rng_state()
        self._device_module: ModuleType | None = None
        torch.default_generator.manual_seed(seed)
        if device.type not in ("cpu", "meta"):
            self._device_module = torch.get_device_module(device)
            self._device_state = self._device_module.get_rng_state()
            self._device_module.manual_seed(seed)

    def close(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._device_module is not None:
            self._device_module.set_rng_state(self._device_state)


def draw_seed() -> int:
    return int(torch.randint(LARGEST, ()).item())


def stream_of_rank(device: torch.device, mesh: DeviceMesh) -> Stream:
    """Random numbers of this rank alone."""
    # All ranks draw the same number, to which each adds its own.
    return Stream(device, (draw_seed() + 1 + mesh.get_local_rank()) % LARGEST)


def stream_of_group(device: torch.device, mesh: DeviceMesh) -> Stream:
    """Random numbers that are the same on all ranks. Collective."""
    seed = torch.tensor(draw_seed(), device=mesh.device_type)
    dist.broadcast(seed, group=mesh.get_group(), group_src=0)
    return Stream(device, int(seed.item()))


class HasDropout:
    """Whether a module drops anything: it, or one inside it, has a dropout probability above zero."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (inner, name)
            for inner in module.modules()
            for name, value in vars(inner).items()
            if isinstance(value, float) and (isinstance(inner, torch_modules.Dropout) or "drop" in name)
        ]

    def __call__(self) -> bool:
        return any(inner.training and getattr(inner, name, 0.0) > 0.0 for inner, name in self._places)
