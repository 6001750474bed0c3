"""What a prepared loader is put together from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.config.enums import RNGType
from lockstep.data.batch_sharding import ShardPlan
from lockstep.data.drawn import SeededSampler
from lockstep.data.readers import GlobalBatches, Reader
from lockstep.data.rng import Generators, States
from lockstep.runtime.step import StepState


@dataclass(frozen=True)
class LoaderParts:
    """What ``prepare_loader`` decided, for a ``PreparedLoader``.

    ``generators``: those that its samplers may draw from (None: the order is a function of seed and epoch).
    ``stateful_samplers``: those that keep a state. ``seedable`` is the sampler that is seeded for each epoch, if there
    is one, and ``common_states`` gives every rank the generators' states of rank 0 (None: no other rank needs them).

    ``original`` is the user's loader. ``processes``: of the run, also those that share a model. ``mover`` gives what
    moves a batch to ``device`` (None: it stays). ``batches`` and ``samples`` are those of the whole order (None:
    unknown). ``opaque``: the dataset makes whole batches itself. ``reads``: this rank reads. ``dispatch`` turns the
    rounds read on rank 0 into this rank's. Generators of ``rng_types`` are made equal on all ranks in each epoch that
    is not continued.
    """

    original: DataLoader[object]
    reader: Reader
    plan: ShardPlan
    rank: int
    processes: int
    seed: int
    step: StepState
    device: torch.device | None
    mover: Callable[[torch.device], Callable[[object], Any]]
    batches: int | None
    samples: int | None
    opaque: bool
    reads: bool
    dispatch: Callable[[GlobalBatches | None], GlobalBatches] | None
    rng_types: list[RNGType]
    generators: Generators | None
    stateful_samplers: list[Any]
    seedable: SeededSampler | None
    common_states: Callable[[States], States] | None
