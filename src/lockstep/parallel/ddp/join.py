"""Training on inputs that end earlier on some ranks than on others."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable

from lockstep.errors import UsageError
from lockstep.torch_internals.fsdp2 import is_sharded


def join_replicas(models: Iterable[Any], world_size: int) -> AbstractContextManager[object]:
    """Ranks that have run out of batches answer the others' collectives until all are done.

    Reference: ``torch.distributed.algorithms.join``.

    Raises:
        UsageError: an object that is not a replica made by ``prepare``.
    """
    if world_size == 1:
        return nullcontext()
    models = list(models)
    for model in models:
        if is_sharded(model):
            raise UsageError(
                f"join_uneven_inputs got a {type(model).__name__} that is sharded: every rank takes part in each of "
                "its forwards. Use even batches and accelerator.sample_weights(), or parallel='ddp'."
            )
        if not isinstance(model, Joinable):
            raise UsageError(
                f"join_uneven_inputs got a {type(model).__name__}, which is not replicated over the ranks. "
                "Pass the models that accelerator.prepare() returned."
            )
    return Join(models, enable=True, throw_on_early_termination=False)
