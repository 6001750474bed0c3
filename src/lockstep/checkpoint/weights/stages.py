"""The weights of a model whose blocks are on several ranks, on one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.checkpoint.contents import NO_TIES, FullModelSpec
from lockstep.checkpoint.state import memory_key
from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.comm.dtensor import whole as gathered


def collect_stages(
    state: Mapping[str, object], communicator: Communicator, whole: FullModelSpec = NO_TIES
) -> dict[str, Any]:
    """All ranks' entries of a ``state_dict`` on rank 0, in host memory, and nothing on the others; collective.

    One tensor at a time is gathered where it is spread, and sent. Names of one weight share memory afterwards. Of a
    name that several ranks have, the first one's value is taken.

    Args:
        state: What this rank's blocks have.
        whole: The order of the names, and the weights that are tied across ranks.
    """
    rank = communicator.runtime.rank
    with raise_on_all_ranks(communicator):
        tensors, mine = _described(state, whole)
    told: list[list[tuple[str, str, object]]] = communicator.gather_object([mine])
    holders: dict[str, tuple[int, object]] = {}
    firsts: dict[str, str] = {}
    for holder, entries in enumerate(told):
        for name, first, value in entries:
            firsts.setdefault(name, first)
            holders.setdefault(first, (holder, value))
    found: dict[str, object] = {}
    for first, (holder, value) in holders.items():
        if not isinstance(value, torch.Tensor):
            found[first] = value
            continue
        tensor = gathered(tensors[first], keep=rank == holder) if first in tensors else None
        found[first] = communicator.transfer(tensor, value, holder, 0)
    if rank > 0:
        return {}
    place = {name: number for number, name in enumerate(whole.names)}
    names = sorted(firsts, key=lambda name: place.get(name, len(place)))  # stable
    return {name: found[firsts[name]] for name in names}


def _described(
    state: Mapping[str, object], whole: FullModelSpec
) -> tuple[dict[str, torch.Tensor], list[tuple[str, str, object]]]:
    """The tensors by their first names, and (name, first name, value or a tensor without elements) of each entry."""
    tensors: dict[str, torch.Tensor] = {}
    entries: list[tuple[str, str, object]] = []
    places: dict[object, str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            entries.append((name, name, value))
            continue
        first = places.setdefault(memory_key(value), name) if value.numel() else name
        first = whole.ties.get(first, first)
        tensors.setdefault(first, value)
        entries.append((name, first, torch.empty(value.shape, dtype=value.dtype, device="meta")))
    return tensors, entries
