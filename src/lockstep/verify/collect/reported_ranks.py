"""One process that tells a script of several: how many there are, and how short their loaders are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from lockstep.data.loader import PreparedLoader
from lockstep.runtime.control import ProcessControl


class _ReportingLoader(PreparedLoader):
    """A loader with all ranks' batches, and the length that one rank's has."""

    reported_ranks = 1

    def __len__(self) -> int:
        return -(-super().__len__() // self.reported_ranks)


def report_ranks(ranks: int) -> Callable[[], None]:
    """Let ``accelerator.num_processes`` be so many, until what is returned is called."""
    original = ProcessControl.num_processes
    ProcessControl.num_processes = property(lambda self: ranks)  # type: ignore[method-assign,assignment]

    def restore() -> None:
        ProcessControl.num_processes = original  # type: ignore[method-assign]

    return restore


def report_length(loader: PreparedLoader, ranks: int) -> None:
    """Let ``len`` of a loader be that of one of so many ranks."""
    loader.__class__ = _ReportingLoader
    vars(loader)["reported_ranks"] = ranks


def report_world_size(ranks: int) -> None:
    """Let a script that uses ``torch.distributed`` itself be told of so many ranks, where its group has one.

    Libraries that it calls get the group as it is.
    """
    size_of = dist.get_world_size
    begin: Callable[..., None] = dist.init_process_group
    mesh_of: Callable[..., object] = device_mesh.init_device_mesh

    def get_world_size(group: dist.ProcessGroup | None = None) -> int:
        return ranks if group is None and _is_of_script(sys._getframe(1)) else size_of(group)

    def init_process_group(*args: object, **kwargs: object) -> None:
        given = dict(zip(("backend", "init_method", "timeout"), args, strict=False)) | kwargs
        begin(**{**given, "world_size": 1, "rank": 0})

    def init_device_mesh(
        device_type: str, mesh_shape: tuple[int, ...], *args: object, **kwargs: object
    ) -> object:
        return mesh_of(device_type, (1,) * len(mesh_shape), *args, **kwargs)

    dist.get_world_size = get_world_size
    dist.init_process_group = init_process_group
    for owner in (dist, device_mesh):
        vars(owner)["init_device_mesh"] = init_device_mesh


def _is_of_script(frame: FrameType) -> bool:
    path = os.path.realpath(frame.f_code.co_filename)
    return "site-packages" not in path and not path.startswith(os.path.dirname(torch.__file__))
