"""Bytes of training state that this rank holds, counted tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from lockstep.comm.dtensor import local
from lockstep.comm.tree import leaves
from lockstep.offload.files.direct import region_of
from lockstep.parallel.parallel_model import ParallelModel

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True)
class StateBytes:
    """The bytes of training state on this rank, on device, host and disk together.

    Args:
        weights: Bytes of parameters.
        gradients: Bytes of gradients.
        optimizer: Bytes of optimizer state.
        on_disk: Those of these bytes that are in files of ``offload_to``.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator

        accelerator = Accelerator()
        model = torch.nn.Linear(100, 100, bias=False)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        held = accelerator.state_bytes()
        assert held.weights == 40_000 and held.optimizer == 0  # AdamW has no state before its first step
        assert held.total == held.weights + held.gradients
        ```
    """

    weights: int
    gradients: int
    optimizer: int
    on_disk: int = 0

    @property
    def total(self) -> int:
        """The sum of the bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


@torch.no_grad()
def count_state(models: Iterable[ParallelModel], optimizers: Iterable[Optimizer]) -> StateBytes:
    """Return what models and optimizers hold now: of a sharded tensor this rank's part, of a tied one once.

    Gradients are also those that a window has not reduced yet. Not counted: buffers, gathered weights, DDP's
    buckets, activations.
    """
    models = list(models)
    kinds = (
        [parameter for model in models for parameter in _local_parameters(model)],
        [gradient for model in models for gradient in model.gradients()],
        [
            value
            for optimizer in optimizers
            for values in optimizer.state.values()
            for value in leaves(values).values()
            if isinstance(value, torch.Tensor)
        ],
    )
    weights, gradient, state = (_bytes(tensors) for tensors in kinds)
    dense = (t for tensors in kinds for t in tensors if local(t).layout is torch.strided)
    on_disk = _bytes(t for t in dense if region_of(local(t)) is not None)
    return StateBytes(weights, gradient, state, on_disk)


def _local_parameters(model: ParallelModel) -> Iterator[torch.Tensor]:
    """Yield the parameters, and in the places of gathered ones their shards."""
    shards = {id(whole): shard for sharding in model.shardings for whole, shard in sharding.gathered()}
    return (shards.get(id(parameter), parameter) for parameter in model.parameters())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this rank's parts, each object counted once."""
    parts = [local(tensor) for tensor in tensors]
    return sum({id(part): _nbytes(part) for part in parts}.values())


def _nbytes(part: torch.Tensor) -> int:
    """Return the bytes of a tensor; of a sparse one, those of its indices and values."""
    if part.layout is torch.strided:
        return part.nbytes
    if part.layout is torch.sparse_coo:
        part = part.coalesce()
        return part.indices().nbytes + part.values().nbytes
    return part.values().nbytes if part.layout in COMPRESSED else 0
