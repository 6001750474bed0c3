"""Whole weights of a prepared model for a while, such as to generate with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.errors import UsageError
from lockstep.parallel.parallel_model import ParallelModel, unwrap
from lockstep.torch_internals import fsdp2

if TYPE_CHECKING:
    from lockstep.preparation.prepare import Preparation


@contextmanager
def summon_full_params(
    preparation: Preparation, communicator: Communicator, splits: list[str], model: nn.Module
) -> Iterator[nn.Module]:
    """See ``Accelerator.summon_full_params``. ``splits``: what takes forwards of this run apart, such as tp."""
    with raise_on_all_ranks(communicator):
        found = _prepared(preparation.models.prepared, splits, model)
    preparation.finish_steps()  # of the step before, which may still write shards
    with raise_on_all_ranks(communicator), found.summoned(), torch.no_grad():
        yield found.unwrap()


def _prepared(models: Iterable[ParallelModel], splits: list[str], model: nn.Module) -> ParallelModel:
    kind = type(unwrap(model)).__name__.removeprefix("FSDP")
    if splits:
        raise UsageError(
            f"summon_full_params gathers whole weights, but under {splits[0]} no rank computes with the whole "
            f"{kind}, because its forwards communicate. Call the model on all ranks, or train with ddp or zero."
        )
    found = next((known for known in models if model in (known.module, known.plain)), None)
    if found is None:
        elsewhere = " by this Accelerator" if fsdp2.is_sharded(model) else ""
        raise UsageError(
            f"summon_full_params got {kind}, which was not prepared{elsewhere}. Pass the model that prepare() "
            "returned."
        )
    return found
