"""TorchTrainer without a process group of Ray's: each rank's own process makes one. Imports ray."""

from __future__ import annotations

from contextlib import nullcontext

from ray.train.backend import Backend
from ray.train.torch import TorchConfig


class NoGroup(Backend):
    """Sets nothing up. Ranks of one machine see all of its GPUs, and take that of their local rank."""

    share_cuda_visible_devices = True


class NoGroupConfig(TorchConfig):
    """A TorchConfig that leaves the process group, and the GPU's context, to the process of the rank."""

    @property
    def backend_cls(self) -> object:
        return NoGroup

    @property
    def train_func_context(self) -> object:
        return nullcontext
