"""The process group of ranks that share memory: torch's collectives under torch's names, on slots and channels."""

# torch's own type of a group has further forms of these methods, which neither C++ nor torch.distributed calls.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.enums import CPUBackend
from lockstep.errors import UsageError
from lockstep.shared_memory.algorithms import HostCollectives
from lockstep.shared_memory.calls import CollectiveOptions, GroupCalls
from lockstep.shared_memory.channel import Channels
from lockstep.shared_memory.history import CallHistory
from lockstep.shared_memory.pending import PendingCall
from lockstep.shared_memory.slots import Peers
from lockstep.torch_internals import c10d
from lockstep.torch_internals.c10d import CPU
from lockstep.torch_internals.compile import leave_out
from lockstep.torch_internals.dispatch import modes_are_active, unseen_by_modes


def alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what would be received if every rank sent what this one does: other sizes cannot be shown to
    modes.
    """
    with unseen_by_modes():
        return [torch.empty_like(tensor) for tensor in tensors]


@leave_out
class SharedMemoryGroup(dist.ProcessGroup):
    """Ranks that share memory. torch makes it where the backend ``shm`` is asked for.

    Args:
        peers: The ranks.

    Attributes:
        gathered, reduced: Memory for tensors that are made to be gathered or reduced.

    It takes CPU tensors of any size and dtype, and the reductions of ``algorithms.COMBINE``. Results are equal bit for
    bit on all ranks and from run to run. What the ranks call is compared: calls that do not belong together raise
    CollectiveMismatchError on every rank.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        name: str,
        peers: Peers,
        collectives: HostCollectives,
        messages: Channels,
    ) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]
        self._name, self._peers = name, peers
        self.history = CallHistory(name)
        self._calls = GroupCalls(rank, ranks, name, collectives, messages, self.history)
        self.gathered, self.reduced = self._calls.gathered, self._calls.reduced
        peers.doing = self.history.oldest_pending
        c10d.set_group_name(self, name)
        self._shown = c10d.group_that_does_nothing(rank, ranks, name)
        self._leave = self._calls.at_end_of(self, peers.segment)

    # What torch asks a group.

    def getBackendName(self) -> str:
        return CPUBackend.SHM.value

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def _get_backend(self, device: torch.device) -> SharedMemoryGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"Group {self._name} uses shared memory, which carries tensors on the CPU only, not on {device}. "
                "Move the tensors to the CPU, or use the backend of that device."
            )
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._peers.timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        """Let every call of every rank that waits, now or later, raise."""
        self._peers.abort()

    def shutdown(self) -> None:
        """Leave: ranks that wait for this one raise."""
        self._leave()

    def _show(self, name: str, *arguments: object) -> None:
        """Let a mode that looks on see a call, made to a backend that does nothing."""
        if modes_are_active():
            getattr(self._shown, name)(*arguments)

    # Collectives, under the names by which torch calls them. Each first goes through torch's dispatcher where a mode
    # looks on, to a backend that does nothing.

    def allreduce(self, tensors: list[Tensor], opts: CollectiveOptions = None) -> PendingCall:
        opts = opts or dist.AllreduceOptions()
        self._show("allreduce", tensors, opts)
        if tensors[0].is_sparse:
            return self._calls.all_reduce_sparse(tensors, opts)
        return self._calls.all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: CollectiveOptions = None) -> PendingCall:
        opts = opts or dist.AllreduceCoalescedOptions()
        self._show("allreduce_coalesced", tensors, opts)
        return self._calls.all_reduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: CollectiveOptions) -> PendingCall:
        self._show("reduce", tensors, opts)
        return self._calls.reduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: CollectiveOptions = None) -> PendingCall:
        opts = opts or dist.BroadcastOptions()
        self._show("broadcast", tensors, opts)
        return self._calls.broadcast(tensors, opts)

    def barrier(self, opts: CollectiveOptions = None) -> PendingCall:
        opts = opts or dist.BarrierOptions()
        self._show("barrier", opts)
        return self._calls.barrier(opts)

    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or c10d.AllgatherOptions()
        self._show("allgather", output_tensors, input_tensors, opts)
        return self._calls.all_gather(output_tensors, input_tensors, opts, output_tensors)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: CollectiveOptions = None) -> PendingCall:
        opts = opts or c10d.AllgatherOptions()
        if modes_are_active():
            # Not the output itself: the backend that does nothing writes into all of it, and in ``gathered`` the parts
            # of other ranks lie there already.
            (shown,) = alike([output])
            self._shown._allgather_base(shown, input, opts)
        return self._calls.all_gather_flat([output], [input], opts, output)

    all_gather_single: Any = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or c10d.AllgatherOptions()
        self._show("allgather_into_tensor_coalesced", outputs, inputs, opts)
        return self._calls.all_gather_flat(outputs, inputs, opts, outputs)

    all_gather_single_coalesced: Any = allgather_into_tensor_coalesced

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or c10d.AllgatherOptions()
        self._show("allgather_coalesced", output_lists, input_list, opts)
        outputs = [list(of_one) for of_one in zip(*output_lists, strict=True)]
        return self._calls.all_gather(outputs, input_list, opts, output_lists)

    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: CollectiveOptions
    ) -> PendingCall:
        self._show("gather", output_tensors, input_tensors, opts)
        return self._calls.gather(output_tensors, input_tensors, opts)

    def scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: CollectiveOptions
    ) -> PendingCall:
        self._show("scatter", output_tensors, input_tensors, opts)
        return self._calls.scatter(output_tensors, input_tensors, opts)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or dist.ReduceScatterOptions()
        self._show("reduce_scatter", output_tensors, input_tensors, opts)
        return self._calls.reduce_scatter(output_tensors, input_tensors, opts)

    def _reduce_scatter_base(
        self, output: Tensor, input: Tensor, opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or dist.ReduceScatterOptions()
        self._show("_reduce_scatter_base", output, input, opts)
        return self._calls.reduce_scatter_flat([output], [input], opts, output)

    reduce_scatter_single: Any = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or dist.ReduceScatterOptions()
        self._show("reduce_scatter_tensor_coalesced", outputs, inputs, opts)
        return self._calls.reduce_scatter_flat(outputs, inputs, opts, outputs)

    reduce_scatter_single_coalesced: Any = reduce_scatter_tensor_coalesced

    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or dist.AllToAllOptions()
        if modes_are_active():
            self._shown.alltoall(alike(input_tensors), input_tensors, opts)
        return self._calls.all_to_all(output_tensors, input_tensors, opts)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: CollectiveOptions = None,
    ) -> PendingCall:
        opts = opts or dist.AllToAllOptions()
        if modes_are_active():
            (received,) = alike([input])
            self._shown.alltoall_base(received, input, input_split_sizes, input_split_sizes, opts)
        return self._calls.all_to_all_flat(output, input, output_split_sizes, input_split_sizes, opts)

    all_to_all_single: Any = alltoall_base

    # Messages between two ranks.

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> PendingCall:
        self._show("send", tensors, dst, tag)
        return self._calls.send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> PendingCall:
        self._show("recv", tensors, src, tag)
        return self._calls.receive(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> PendingCall:
        raise UsageError(
            f"Group {self._name} uses shared memory, in which a message has a ring of its own for each sender. Name "
            "the rank that sends it (src=), or make a group with backend='gloo'."
        )
