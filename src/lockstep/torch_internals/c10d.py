"""``torch.distributed``: groups, stores, DDP's reducer, collectives that can be traced, and records of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.torch_internals.versions import expect, probed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Reducer

CPU = torch.device("cpu")

# A type of its own since 2.12.
GroupName: Any = getattr(dist.distributed_c10d, "GroupName", str)

if dist.is_available():
    # The import registers the operators of ``traced``.
    import torch.distributed._functional_collectives
    from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions

    # What DDP hands to a communication hook.
    from torch._C._distributed_c10d import GradBucket as GradBucket
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store


def group_named(name: str) -> dist.ProcessGroup:
    """Relies on: ``_resolve_process_group`` finds the group of a ``group_name``, as collectives in a graph have it."""
    found: Any = torch._C._distributed_c10d
    group: dist.ProcessGroup = found._resolve_process_group(name)
    return group


def register_work(tensor: torch.Tensor, work: object) -> None:
    """Let ``wait_tensor`` of the tensor wait for the work. Relies on: ``_register_work``."""
    found: Any = torch._C._distributed_c10d
    found._register_work(tensor, work)


def records_itself(backend: str) -> None:
    """Keep torch's flight recorder from groups of this backend, which have no C++ backend that it could follow.

    Relies on: ``_FR_SELF_RECORDING_BACKENDS``, since 2.15; before, only torch's own backends were recorded.
    """
    known = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(known, set):
        known.add(backend)


def names_of_groups() -> dict[object, str]:
    """Process group -> its name, as the flight recorder has it. Relies on: ``_world.pg_names``; none if it is gone."""
    world = getattr(dist.distributed_c10d, "_world", None)
    names = getattr(world, "pg_names", None)
    return dict(names) if isinstance(names, dict) else {}


def default_store() -> Store:
    """Return the store of the main group. Relies on: ``_get_default_store``."""
    return dist.distributed_c10d._get_default_store()


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Return what carries a group's (None: the main one's) tensors of the device.

    Relies on: ``_get_backend``, and ``wrapped_pg`` with TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    asked: Any = group or dist.group.WORLD
    backend = asked._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def broadcast_coalesced(group: Any, tensors: list[torch.Tensor], most_bytes: int, source: int) -> None:
    """Broadcast in place from a rank of the group, in messages of at most so many bytes: DDP's own way for buffers.

    Relies on: ``_broadcast_coalesced``.
    """
    dist._broadcast_coalesced(group, tensors, most_bytes, source)  # type: ignore[attr-defined]


def traced() -> Any:
    """Operators on tensors and group names that ``torch.compile`` and fake tensors know.

    Relies on: ``all_reduce``, ``all_gather_into_tensor``, ``reduce_scatter_tensor`` and ``wait_tensor`` of
    ``torch.ops._c10d_functional``.
    """
    return torch.ops._c10d_functional


def reduction_of(op: Any) -> tuple[dist.ReduceOp.RedOpType, float | torch.Tensor | None]:
    """Return (kind, factor or None) of a reduction. Relies on: ``ReduceOp.__getstate__`` tells the factor of
    PREMUL_SUM."""
    kind, factor = (op, None) if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
    return kind, factor


def set_group_name(group: dist.ProcessGroup, name: str) -> None:
    """Give a process group written in Python its name. Relies on: ``_set_group_name``."""
    group._set_group_name(GroupName(name))


def group_that_does_nothing(rank: int, ranks: int, name: str) -> dist.ProcessGroup:
    """Return a process group whose calls go through the dispatcher, where modes see them, and send nothing.

    Relies on: ``FakeProcessGroup``, which torch has for its own tests, and ``_register_backend``.
    """
    group = dist.ProcessGroup(rank, ranks)  # type: ignore[call-arg]
    fake = torch._C._distributed_c10d.FakeProcessGroup
    group._register_backend(CPU, dist.ProcessGroup.BackendType.CUSTOM, fake._create_internal(rank, ranks))
    set_group_name(group, name)
    made: dist.ProcessGroup = group
    return made


def gloo_group(store: Store, rank: int, ranks: int, timeout: timedelta) -> dist.Backend:
    """Return a backend of gloo, for who makes groups. Relies on: ``_set_sequence_number_for_group`` after its
    constructor."""
    backend: Any = dist.ProcessGroupGloo(store, rank, ranks, timeout)
    backend._set_sequence_number_for_group()
    made: dist.Backend = backend
    return made


def set_sparse(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Let a sparse tensor have the entries of another. Relies on: ``copy_`` of sparse tensors takes over all."""
    tensor.copy_(new)


TRACED = {
    "all_reduce": ["input", "reduce_op", "group_name"],
    "all_gather_into_tensor": ["input", "group_size", "group_name"],
    "reduce_scatter_tensor": ["input", "reduce_op", "group_size", "group_name"],
    "wait_tensor": ["tensor"],
}


@probed("torch.distributed", "names groups and collectives")
def probe() -> None:
    """Look at reductions and operators; with no process group of its own, and nothing sent."""
    if not dist.is_available():
        return
    found, number = reduction_of(dist.ReduceOp(dist.ReduceOp.AVG))
    expect(found == dist.ReduceOp.AVG and number is None, "the kind of a reduction")
    for name, arguments in TRACED.items():
        schema = getattr(traced(), name).default._schema
        expect([argument.name for argument in schema.arguments] == arguments, f"the arguments of {name}")
    expect(isinstance(dist.distributed_c10d._world.pg_names, dict), "the names of groups")
    expect(callable(dist._broadcast_coalesced), "the broadcast of buffers")  # type: ignore[attr-defined]


# DDP's reducer ----------------------------------------------------------------------------------------


def check_reduced(reducer: Reducer) -> None:
    """Raise RuntimeError, which says which parameters by number, if a reducer waits for gradients of the last backward.

    Relies on: ``_check_reducer_finalized``.
    """
    reducer._check_reducer_finalized()


def is_joining(replica: DistributedDataParallel) -> bool:
    """Return whether ranks that have ended stand in for the others' collectives: inside of DDP's ``join``.

    Relies on: ``_join_config.enable``.
    """
    return bool(replica._join_config.enable)


def rebuild_buckets(reducer: Reducer) -> bool:
    """Let a reducer form its buckets anew if it is to; whether it has. Collective.

    Relies on: ``_rebuild_buckets``, which DDP calls in the first forward after an averaged backward; it may be called
    after a ``prepare_for_backward`` in which every gradient has arrived.
    """
    return bool(reducer._rebuild_buckets())


# The flight recorder: which collectives this process has issued, and which are complete. It is read in its JSON form:
# asking for the other, a pickle, imports torch's compiler into a process that stands still. Nobody's numbers depend on
# it, so that what it does not tell is looked for in the Python stack.

DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Relies on: functions (include collectives, only active ones) to JSON text, of gloo and others, and of NCCL."""


def recorder_traces() -> Iterator[Mapping[str, object]]:
    """Yield the traces of this process, by kind of recorder. What a recorder raises or says wrongly is left out."""
    try:
        from torch._C import _distributed_c10d
    except ImportError:
        return
    for name in DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is None:
            continue
        try:
            trace = json.loads(dump(True, False))
        except Exception:
            continue
        if isinstance(trace, dict):
            yield trace


@probed("flight recorder", "lists collectives")
def probe_recorder() -> None:
    """Read the records that there are."""
    found = list(recorder_traces())
    expect(bool(found), "a recorder that can be read")
    for trace in found:
        expect(isinstance(trace.get("entries", []), list), "the list of records")
