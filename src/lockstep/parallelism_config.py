"""``ParallelismConfig``, the sizes of axes, under the module name that scripts import from ``accelerate``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.config.files import JsonObject
from lockstep.config.sources import inherited_environment
from lockstep.config.values import parse_integer
from lockstep.errors import ConfigError
from lockstep.runtime.mesh import JOINT_AXES
from lockstep.torch_internals import dtensor
from lockstep.utils.dataclasses import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelismConfig"]

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Of the mesh, outermost first."""


@dataclass
class ParallelismConfig:
    """The number of ranks on each axis of the mesh, in the words of Accelerate's class of this name.

    ``Accelerator(parallelism_config=...)`` takes it as the words of ``parallel`` that are named below. A size that is
    None is read from the variable ``PARALLELISM_CONFIG_<AXIS>_SIZE``, which a launcher sets, or else it is 1.

    Args:
        dp_replicate_size: The number of groups that hold a whole model each (``replicate``).
        dp_shard_size: The number of ranks over which each weight is sharded (``zero=3``).
        tp_size: The number of ranks over which layers are split (``tp``).
        cp_size: The number of ranks over which the sequence is split (``cp``).
        cp_backend: ``"torch"``, the only one.
        sp_size: The same as ``cp_size``, with ``cp_method=ulysses``. One of the two is 1.
        sp_backend: ``"deepspeed"``, the only name; torch computes it here.
        tp_handler: Options of tp; see ``TorchTensorParallelConfig``.
        cp_handler: Options of cp; see ``TorchContextParallelConfig``.
        sp_handler: Options of sp; see ``DeepSpeedSequenceParallelConfig``.

    Raises:
        ConfigError: a size is not a positive integer, a backend is another one, or both ``cp_size`` and ``sp_size``
            are above 1.

    Examples:
        ```python
        from lockstep.parallelism_config import ParallelismConfig

        config = ParallelismConfig(dp_shard_size=2, tp_size=2)
        assert config.total_size == 4
        assert config.to_json()["tp_size"] == 2
        # accelerator = Accelerator(parallelism_config=config), on 4 ranks
        ```
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    def __post_init__(self) -> None:
        self.device_mesh: DeviceMesh | None = None
        environ = inherited_environment()
        for axis in AXES:
            name = f"{axis}_size"
            variable = f"PARALLELISM_CONFIG_{name.upper()}"
            given = getattr(self, name)
            value = environ.get(variable) or 1 if given is None else given
            origin = name if given is not None else variable
            setattr(self, name, parse_integer(value, origin, at_least=1))
        self.cp_backend = self.cp_backend or environ.get("PARALLELISM_CONFIG_CP_BACKEND") or "torch"
        self.sp_backend = self.sp_backend or environ.get("PARALLELISM_CONFIG_SP_BACKEND") or "deepspeed"
        for name, known in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if getattr(self, name) != known:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, but must be {known!r}. Leave it out to use that."
                )
        if self.tp_size > 1 and self.tp_handler is None:  # type: ignore[operator]
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_size > 1 and self.cp_handler is None:  # type: ignore[operator]
            self.cp_handler = TorchContextParallelConfig(environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY"))
        if self.sp_size > 1 and self.sp_handler is None:  # type: ignore[operator]
            self.sp_handler = DeepSpeedSequenceParallelConfig()
        if self.cp_enabled and self.sp_enabled:
            raise ConfigError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both split the sequence, but only one can. "
                "Set one of them to 1."
            )

    def to_json(self) -> JsonObject:
        """Return the fields as plain values: name -> value."""
        return asdict(self)

    # -- which axes there are --------------------------------------------------------------------------

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several groups that hold a whole model each."""
        return self._size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether each weight is sharded over several ranks."""
        return self._size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split over several ranks."""
        return self._size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether the sequence is split over several ranks, with ``cp_size``."""
        return self._size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether the sequence is split over several ranks, with ``sp_size``."""
        return self._size("sp") > 1

    @property
    def active_mesh_dims(self) -> list[str]:
        """The names of the axes that have several ranks, in the order of the mesh."""
        return [axis for axis in AXES if self._size(axis) > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The names of the axes of data parallel training that have several ranks."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The names of the other axes that have several ranks."""
        return self._active("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The names of those of the axes ``dp_shard`` and ``cp`` that have several ranks."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The names of those of the axes ``dp_replicate``, ``dp_shard`` and ``cp`` that have several ranks."""
        return self._active("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The names of the axes that ``fully_shard`` gets: that of replicas, if there are several, and that of
        shards.
        """
        return [*self._active("dp_replicate"), "dp_shard_cp"]

    # -- how many ranks --------------------------------------------------------------------------------

    @property
    def total_size(self) -> int:
        """The number of ranks of the mesh: the product of all sizes."""
        return math.prod(map(self._size, AXES))

    @property
    def data_parallel_size(self) -> int:
        """The product of ``dp_replicate_size`` and ``dp_shard_size``."""
        return self._size("dp_replicate") * self._size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """The product of ``tp_size``, ``cp_size`` and ``sp_size``."""
        return self._size("tp") * self._size("cp") * self._size("sp")

    # -- the mesh --------------------------------------------------------------------------------------

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Make torch's ``DeviceMesh`` of the axes that have several ranks, and keep it. Call it on every rank.

        Args:
            device_type: ``"cuda"`` or ``"cpu"``, for instance.

        Returns:
            The mesh. None: no axis has several ranks.

        Raises:
            ConfigError: the number of processes is not the product of the sizes.

        Examples:
            ```python
            from lockstep import Accelerator
            from lockstep.parallelism_config import ParallelismConfig

            accelerator = Accelerator()
            config = ParallelismConfig(dp_shard_size=accelerator.num_processes)
            mesh = config.build_device_mesh("cpu")
            assert (mesh is None) == (accelerator.num_processes == 1)
            ```
        """
        from torch.distributed.device_mesh import init_device_mesh

        names, sizes = self._get_mesh()
        if not names:
            return None
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else self.total_size
        if self.total_size != world:
            axes = " x ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
            raise ConfigError(
                f"The mesh has {self.total_size} ranks ({axes}), but there are {world} processes. Make them equal."
            )
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        for joint, parts in JOINT_AXES.items():
            if self._active(*parts):
                dtensor.flatten(mesh[self._active(*parts)], joint)  # type: ignore[index]
        self.device_mesh = mesh
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh. With a ``device_type``, ``build_device_mesh`` makes it if it does not exist yet.

        Examples:
            ```python
            from lockstep import Accelerator
            from lockstep.parallelism_config import ParallelismConfig

            accelerator = Accelerator()
            config = ParallelismConfig(dp_shard_size=accelerator.num_processes)
            mesh = config.get_device_mesh("cpu")
            assert config.get_device_mesh() is mesh  # built once
            ```
        """
        if self.device_mesh is None and device_type is not None:
            return self.build_device_mesh(device_type)
        return self.device_mesh

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return names and sizes of the axes with several ranks, outermost first."""
        names = tuple(self.active_mesh_dims)
        return names, tuple(map(self._size, names))

    def _size(self, axis: str) -> int:
        return int(getattr(self, f"{axis}_size"))

    def _active(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._size(axis) > 1]
