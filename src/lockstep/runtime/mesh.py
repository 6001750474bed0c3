"""Which ranks share what, as views of torch's DeviceMesh: data, weights, gradients, loss and the parts of one model.

The mesh is pp x replicate x shard x cp x tp, outermost first, so that ranks which talk most are neighbours.

    what                            is equal on ranks that differ in     is averaged over
    the batch                       pp, cp, tp                           -
    gradients of a parameter        (all of the right-hand side)         replicate, shard, cp
    the gradient of an expert       (all of the right-hand side)         ranks with the same expert
    the loss, as ``reduce`` has it  pp, cp, tp                           all
    the norm of gradients           everything                           summed over pp and over shards
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch.distributed as dist

from lockstep.config.parallel import Parallel
from lockstep.config.world import ParallelDims, axes_of
from lockstep.runtime.process import Runtime
from lockstep.torch_internals import dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ORDER = ("pp", "replicate", "shard", "cp", "tp")

# What scripts written for Accelerate call them.
_NAMED = {"replicate": "dp_replicate", "shard": "dp_shard"}


JOINT_AXES = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


class DeviceMeshes:
    """The views of one run's mesh. Each is made when it is first used, which is collective.

    Raises:
        ConfigError: the world cannot be divided as ``parallel`` says.
    """

    def __init__(self, runtime: Runtime, parallel: Parallel) -> None:
        self.axes: ParallelDims = axes_of(parallel, runtime.world_size)
        self._runtime = runtime

    @property
    def data_rank(self) -> int:
        """The number of this rank's batches: ranks with the same one get the same."""
        return self.axes.data_rank(self._runtime.rank)

    @property
    def data_size(self) -> int:
        """How many ranks have batches of their own."""
        return self.axes.data

    @cached_property
    def data_runtime(self) -> Runtime:
        """This process as one of those with batches of their own."""
        if not self.axes.splits_model:
            return self._runtime
        return replace(self._runtime, rank=self.data_rank, world_size=self.data_size)

    @cached_property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks with batches of their own that this one belongs to; None: all ranks, or no group is needed."""
        return self._group("replicate", "shard") if self.axes.splits_model and self.data_size > 1 else None

    @cached_property
    def gradient_group(self) -> dist.ProcessGroup | None:
        """The ranks over which gradients are averaged; None: all, or this one alone (see ``gradient_size``)."""
        if self.axes.pp * self.axes.tp == 1 or self.gradient_size == 1:
            return None
        return self._group("replicate", "shard", "cp")

    @property
    def gradient_size(self) -> int:
        """How many ranks gradients are averaged over."""
        return self.axes.data * self.axes.cp

    @property
    def gradient_rank(self) -> int:
        """The place of this rank among those over which gradients are averaged."""
        # rank = ((pp * data + place in data) * cp + place in cp) * tp + place in tp
        return self._runtime.rank // self.axes.tp % self.gradient_size

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the stages of the same pipeline; None: there is one stage."""
        mesh = self.axis("pp")
        return None if mesh is None else mesh.get_group()

    def rank_on(self, axis: str) -> int:
        """Return the place of this rank on an axis of the mesh; 0 where the axis has one rank."""
        inner = _ORDER[_ORDER.index(axis) + 1 :]
        stride = math.prod(getattr(self.axes, name) for name in inner)
        return self._runtime.rank // stride % int(getattr(self.axes, axis))

    @cached_property
    def named_mesh(self) -> DeviceMesh | None:
        """The axes of several ranks as one mesh, under the names that scripts look for; None where all ranks replicate.

        ``dp``, ``dp_shard_cp`` and ``dp_cp`` are axes of it as well, where some of their parts are.
        """
        if not (self.axes.splits_model or self.axes.shard > 1):
            return None
        sizes = {_NAMED.get(name, name): int(getattr(self.axes, name)) for name in _ORDER}
        mesh = self._make_mesh({name: size for name, size in sizes.items() if size > 1})
        for joint, parts in JOINT_AXES.items():
            present = tuple(part for part in parts if sizes[part] > 1)
            if present:
                dtensor.flatten(mesh[present], joint)
        return mesh

    def axis(self, name: str) -> DeviceMesh | None:
        """Return the ranks along ``pp``, ``cp``, ``tp`` or ``ep``; None where the axis has one rank."""
        if getattr(self.axes, name) == 1:
            return None
        return self._experts["ep"] if name == "ep" else self._mesh[name]

    @property
    def expert_replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same experts; None: only this one."""
        if self.axes.ep in (1, self.axes.data):
            return None
        return self._experts["replicate"].get_group()

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """What ZeRO shards over: axis ``shard``, and before it ``replicate`` if there are several copies."""
        axes = self.axes
        if axes.splits_model:
            mesh = self._mesh
            # Ranks that share a sequence hold the same weights, so these are sharded over cp as well.
            shard = "shard"
            if axes.cp > 1:
                shard = "shard_cp" if axes.shard > 1 else "cp"
                if axes.shard > 1:
                    dtensor.flatten(mesh["shard", "cp"], shard)
            return mesh[("replicate", shard) if axes.replicate > 1 else (shard,)]
        if axes.replicate == 1:
            return self._make_mesh({"shard": axes.shard})
        return self._make_mesh({"replicate": axes.replicate, "shard": axes.shard})

    @cached_property
    def _mesh(self) -> DeviceMesh:
        sizes = {name: getattr(self.axes, name) for name in _ORDER}
        return self._make_mesh({name: size for name, size in sizes.items() if size > 1})

    @cached_property
    def _experts(self) -> DeviceMesh:
        return self._make_mesh({"replicate": self.axes.data // self.axes.ep, "ep": self.axes.ep})

    def _make_mesh(self, sizes: dict[str, int]) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self._runtime.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def _group(self, *names: str) -> dist.ProcessGroup:
        present = tuple(name for name in names if getattr(self.axes, name) > 1)
        mesh = self._mesh[present]
        return mesh.get_group() if len(present) == 1 else dtensor.flatten(mesh, "_".join(present)).get_group()
