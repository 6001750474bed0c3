"""The process group of ranks that share memory: torch's collectives under torch's names, on slots and channels."""

# torch's own type of a group has further forms of these methods, which neither C++ nor torch.distributed calls.
# mypy: disable-error-code="override"

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.enums import CPUBackend
from lockstep.shared_memory.algorithms import HostCollectives, Memory, RankReduction, check_reduction
from lockstep.shared_memory.buffers import GatheredBuffers, ReducedBuffers
from lockstep.shared_memory.call_code import call_code
from lockstep.shared_memory.channel import Channels
from lockstep.shared_memory.history import CallHistory
from lockstep.shared_memory.hosts import GlooMessages, HierarchicalCollectives
from lockstep.shared_memory.pending import CallQueue, PendingCall
from lockstep.shared_memory.segment import Segment
from lockstep.shared_memory.slots import Peers, Steps
from lockstep.shared_memory.tensors import CallTensors
from lockstep.torch_internals import c10d
from lockstep.torch_internals.c10d import CPU
from lockstep.torch_internals.dispatch import modes_are_active, unseen_by_modes

# What of torch's options is looked at; engines in C++ give them all.
CollectiveOptions = Any

Collectives: TypeAlias = HostCollectives | HierarchicalCollectives
Messages: TypeAlias = Channels | GlooMessages


def _leave(queue: CallQueue, messages: Messages, segment: Segment | None) -> None:
    queue.close()
    messages.close()
    if segment is not None:
        segment.release()


def alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What would be received if every rank sent what this one does: other sizes cannot be shown to modes."""
    with unseen_by_modes():
        return [torch.empty_like(tensor) for tensor in tensors]


class SharedMemoryGroup(dist.ProcessGroup):
    """Ranks some of which share memory. torch makes it where the backend ``shm`` is asked for.

    Args:
        peers: The ranks of this host; None where there are no others.

    Attributes:
        gathered, reduced: Memory for tensors that are made to be gathered or reduced; None: on several hosts.

    It takes CPU tensors of any size and dtype, and the reductions of ``algorithms.COMBINE``. Results are equal bit for
    bit on all ranks and from run to run. What the ranks call is compared: calls that do not belong together raise
    CollectiveMismatchError on every rank.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        name: str,
        peers: Peers | None,
        collectives: Collectives,
        messages: Messages,
    ) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]
        self._me, self._ranks, self._name = rank, ranks, name
        self._peers, self._collectives, self._messages = peers, collectives, messages
        self.gathered: GatheredBuffers | None = None
        self.reduced: ReducedBuffers | None = None
        if isinstance(collectives, HostCollectives):
            self.gathered = GatheredBuffers(collectives.slots)
            self.reduced = ReducedBuffers(collectives.slots)
        self._queue = CallQueue(f"lockstep shared memory {name}")
        self.history = CallHistory(name)
        if peers is not None:
            peers.doing = self.history.oldest_pending
        c10d.set_group_name(self, name)
        self._shown = c10d.group_that_does_nothing(rank, ranks, name)
        segment = None if peers is None else peers.segment
        self._leave = weakref.finalize(self, _leave, self._queue, messages, segment)

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
        if self._peers is not None:
            self._peers.timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        """Let every call of every rank that waits, now or later, raise."""
        if self._peers is not None:
            self._peers.abort()

    def shutdown(self) -> None:
        """Leave: ranks that wait for this one raise."""
        self._leave()

    # Collectives, under the names by which torch calls them. Each first goes through torch's dispatcher where a mode
    # looks on, to a backend that does nothing.

    def allreduce(self, tensors: list[Tensor], opts: CollectiveOptions = None) -> PendingCall:
        opts = opts or dist.AllreduceOptions()
        if modes_are_active():
            self._shown.allreduce(tensors, opts)
        if tensors[0].is_sparse:
            return self._all_reduce_sparse(tensors, opts)
        return self._all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: CollectiveOptions = None) -> PendingCall:
        opts = opts or dist.AllreduceCoalescedOptions()
        if modes_are_active():
            self._shown.allreduce_coalesced(tensors, opts)
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: list[Tensor], opts: CollectiveOptions) -> PendingCall:
        reduction = self._reduction(opts, tensors)
        with unseen_by_modes():
            staging = CallTensors()
            rows = []
            for tensor in tensors:
                block = staging.write(tensor, reads=True)
                call = call_code("all_reduce", block.flat.numel(), block.flat.dtype, reduction.kind)
                rows.append(self._collectives.all_reduce(call, block, reduction))
        return self._submit("all_reduce", rows, tensors, tensors, staging, opts)

    def reduce(self, tensors: list[Tensor], opts: CollectiveOptions) -> PendingCall:
        if modes_are_active():
            self._shown.reduce(tensors, opts)
        reduction, root = self._reduction(opts, tensors), opts.rootRank
        with unseen_by_modes():
            staging = CallTensors()
            block = staging.write(tensors[0], reads=True)
            call = call_code("reduce", block.flat.numel(), block.flat.dtype, reduction.kind, root)
            steps = self._collectives.reduce(call, block, reduction, root)
        return self._submit("reduce", [steps], tensors, tensors, staging, opts)

    def broadcast(self, tensors: list[Tensor], opts: CollectiveOptions = None) -> PendingCall:
        opts = opts or dist.BroadcastOptions()
        if modes_are_active():
            self._shown.broadcast(tensors, opts)
        with unseen_by_modes():
            staging = CallTensors()
            block = staging.write(tensors[0], reads=True)
            call = call_code("broadcast", block.flat.numel(), block.flat.dtype, root=opts.rootRank)
            steps = self._collectives.broadcast(call, block, opts.rootRank)
        return self._submit("broadcast", [steps], tensors, tensors, staging, opts)

    def barrier(self, opts: CollectiveOptions = None) -> PendingCall:
        opts = opts or dist.BarrierOptions()
        if modes_are_active():
            self._shown.barrier(opts)
        steps = self._collectives.barrier(call_code("barrier"))
        return self._submit("barrier", [steps], [], [], CallTensors(), opts)

    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or c10d.AllgatherOptions()
        if modes_are_active():
            self._shown.allgather(output_tensors, input_tensors, opts)
        return self._all_gather(output_tensors, input_tensors, opts, output_tensors)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: CollectiveOptions = None) -> PendingCall:
        opts = opts or c10d.AllgatherOptions()
        if modes_are_active():
            # Not the output itself: the backend that does nothing writes into all of it, and in ``gathered`` the parts
            # of other ranks lie there already.
            (shown,) = alike([output])
            self._shown._allgather_base(shown, input, opts)
        return self._all_gather_flat([output], [input], opts, output)

    all_gather_single: Any = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or c10d.AllgatherOptions()
        if modes_are_active():
            self._shown.allgather_into_tensor_coalesced(outputs, inputs, opts)
        return self._all_gather_flat(outputs, inputs, opts, outputs)

    all_gather_single_coalesced: Any = allgather_into_tensor_coalesced

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or c10d.AllgatherOptions()
        if modes_are_active():
            self._shown.allgather_coalesced(output_lists, input_list, opts)
        outputs = [list(of_one) for of_one in zip(*output_lists, strict=True)]
        return self._all_gather(outputs, input_list, opts, output_lists)

    def _all_gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: CollectiveOptions,
        result: object,
    ) -> PendingCall:
        with unseen_by_modes():
            staging = CallTensors()
            rows = []
            for parts, tensor in zip(outputs, inputs, strict=True):
                mine = staging.read(tensor)
                blocks = [staging.write(part) for part in parts]
                self._check_sizes("all_gather", [mine, *blocks])
                call = call_code("all_gather", mine.flat.numel(), mine.flat.dtype)
                rows.append(self._collectives.all_gather(call, mine, [block.address for block in blocks]))
        return self._submit("all_gather", rows, inputs, result, staging, opts)

    def _all_gather_flat(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: CollectiveOptions, result: object
    ) -> PendingCall:
        with unseen_by_modes():
            staging = CallTensors()
            rows = []
            for output, tensor in zip(outputs, inputs, strict=True):
                mine, whole = staging.read(tensor), staging.write(output)
                if whole.size != self._ranks * mine.size:
                    raise ValueError(
                        f"all_gather of {mine.size} bytes on each of {self._ranks} ranks into {whole.size} bytes: pass "
                        f"an output with {self._ranks} times as many elements, of the same dtype."
                    )
                places = [whole.address + rank * mine.size for rank in range(self._ranks)]
                rows.append(self._gather_flat(output, mine, places))
        return self._submit("all_gather", rows, inputs, result, staging, opts)

    def _gather_flat(self, output: Tensor, mine: Memory, places: Sequence[int]) -> Steps:
        gathered, collectives = self.gathered, self._collectives
        use = None if gathered is None else gathered.use_of(output)
        if gathered is not None and use is not None:
            assert isinstance(collectives, HostCollectives)
            return gathered.all_gather(collectives, mine, places, use)
        return collectives.all_gather(
            call_code("all_gather", mine.flat.numel(), mine.flat.dtype), mine, places
        )

    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: CollectiveOptions
    ) -> PendingCall:
        if modes_are_active():
            self._shown.gather(output_tensors, input_tensors, opts)
        with unseen_by_modes():
            staging = CallTensors()
            mine = staging.read(input_tensors[0])
            blocks = [staging.write(part) for part in output_tensors[0]] if self._me == opts.rootRank else []
            self._check_sizes("gather", [mine, *blocks])
            call = call_code("gather", mine.flat.numel(), mine.flat.dtype, root=opts.rootRank)
            places = [block.address for block in blocks]
            steps = self._collectives.gather(call, mine, places, opts.rootRank)
        return self._submit("gather", [steps], input_tensors, output_tensors, staging, opts)

    def scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: CollectiveOptions
    ) -> PendingCall:
        if modes_are_active():
            self._shown.scatter(output_tensors, input_tensors, opts)
        with unseen_by_modes():
            staging = CallTensors()
            taken = staging.write(output_tensors[0])
            sent = [staging.read(part) for part in input_tensors[0]] if self._me == opts.rootRank else []
            self._check_sizes("scatter", [taken, *sent])
            call = call_code("scatter", taken.flat.numel(), taken.flat.dtype, root=opts.rootRank)
            steps = self._collectives.scatter(call, sent, taken, opts.rootRank)
        return self._submit("scatter", [steps], output_tensors, output_tensors, staging, opts)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or dist.ReduceScatterOptions()
        if modes_are_active():
            self._shown.reduce_scatter(output_tensors, input_tensors, opts)
        reduction = self._reduction(opts, output_tensors)
        with unseen_by_modes():
            staging = CallTensors()
            rows = []
            for output, parts in zip(output_tensors, input_tensors, strict=True):
                out = staging.write(output)
                blocks = [staging.read(part) for part in parts]
                self._check_sizes("reduce_scatter", [out, *blocks])
                rows.append(self._reduce_scatter(blocks, out, reduction, staging))
        return self._submit("reduce_scatter", rows, input_tensors[0], output_tensors, staging, opts)

    def _reduce_scatter_base(
        self, output: Tensor, input: Tensor, opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or dist.ReduceScatterOptions()
        if modes_are_active():
            self._shown._reduce_scatter_base(output, input, opts)
        return self._reduce_scatter_flat([output], [input], opts, output)

    reduce_scatter_single: Any = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or dist.ReduceScatterOptions()
        if modes_are_active():
            self._shown.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return self._reduce_scatter_flat(outputs, inputs, opts, outputs)

    reduce_scatter_single_coalesced: Any = reduce_scatter_tensor_coalesced

    def _reduce_scatter_flat(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: CollectiveOptions, result: object
    ) -> PendingCall:
        reduction = self._reduction(opts, outputs)
        with unseen_by_modes():
            staging = CallTensors()
            rows = []
            for output, tensor in zip(outputs, inputs, strict=True):
                out, whole = staging.write(output), staging.read(tensor)
                if whole.size != self._ranks * out.size:
                    raise ValueError(
                        f"reduce_scatter of {whole.size} bytes over {self._ranks} ranks into {out.size} bytes: pass "
                        f"an input with {self._ranks} times as many elements, of the same dtype."
                    )
                # ``chunk`` makes one part of an empty tensor, however many are asked for.
                parts = [
                    Memory(whole.address + rank * out.size, part)
                    for rank, part in enumerate(
                        whole.flat.chunk(self._ranks) if out.size else [whole.flat] * self._ranks
                    )
                ]
                reduced, collectives = self.reduced, self._collectives
                use = None if reduced is None else reduced.use_of(tensor)
                # A factor would have to be multiplied into the input itself, which the caller keeps.
                if reduced is not None and use is not None and reduction.factor is None:
                    assert isinstance(collectives, HostCollectives)
                    rows.append(reduced.reduce_scatter(collectives, parts, out, reduction, use))
                else:
                    rows.append(self._reduce_scatter(parts, out, reduction, staging))
        return self._submit("reduce_scatter", rows, inputs, result, staging, opts)

    def _reduce_scatter(
        self, parts: list[Memory], out: Memory, reduction: RankReduction, staging: CallTensors
    ) -> Steps:
        # Two values are added in one step, whose output may be one of them. With more ranks it would
        # overwrite what is still to be added.
        if self._ranks > 2 or reduction.factor is not None:
            parts = [staging.apart_from(part, [out]) for part in parts]
        call = call_code("reduce_scatter", out.flat.numel(), out.flat.dtype, reduction.kind)
        return self._collectives.reduce_scatter(call, parts, out, reduction)

    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: CollectiveOptions = None
    ) -> PendingCall:
        opts = opts or dist.AllToAllOptions()
        if modes_are_active():
            self._shown.alltoall(alike(input_tensors), input_tensors, opts)
        with unseen_by_modes():
            staging = CallTensors()
            taken = [staging.write(tensor) for tensor in output_tensors]
            sent = [staging.apart_from(staging.read(tensor), taken) for tensor in input_tensors]
            steps = self._all_to_all(sent, taken)
        return self._submit("all_to_all", [steps], input_tensors, output_tensors, staging, opts)

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
        return self._all_to_all_flat(output, input, output_split_sizes, input_split_sizes, opts)

    all_to_all_single: Any = alltoall_base

    def _all_to_all_flat(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: CollectiveOptions,
    ) -> PendingCall:
        with unseen_by_modes():
            staging = CallTensors()
            whole = staging.write(output)
            source = staging.apart_from(staging.read(input), [whole])
            taken = self._split(whole, output, output_split_sizes)
            sent = self._split(source, input, input_split_sizes)
            steps = self._all_to_all(sent, taken)
        return self._submit("all_to_all", [steps], [input], [output], staging, opts)

    def _all_to_all(self, sent: Sequence[Memory], taken: Sequence[Memory]) -> Steps:
        # Without a number of elements, which may differ between ranks.
        call = call_code("all_to_all", 0, sent[0].flat.dtype)
        return self._collectives.all_to_all(call, sent, taken)

    def _split(self, block: Memory, tensor: Tensor, splits: Sequence[int]) -> list[Memory]:
        """The parts of the first dimension's rows; without splits, equal ones."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if rows % self._ranks:
                raise ValueError(
                    f"all_to_all_single of {rows} rows over {self._ranks} ranks: pass a number of rows that the ranks "
                    "divide, or split sizes."
                )
            splits = [rows // self._ranks] * self._ranks
        if len(splits) != self._ranks or sum(splits) != rows:
            raise ValueError(
                f"all_to_all_single of {rows} rows over {self._ranks} ranks with split sizes {list(splits)}: pass one "
                "size for each rank, which add up to the rows."
            )
        row = block.flat.numel() // rows if rows else 0
        parts, start = [], 0
        for count in splits:
            end = start + count * row
            parts.append(Memory(block.address + start * block.flat.element_size(), block.flat[start:end]))
            start = end
        return parts

    # Messages between two ranks.

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> PendingCall:
        if modes_are_active():
            self._shown.send(tensors, dst, tag)
        self._check_peer(dst)
        with unseen_by_modes():
            staging = CallTensors()
            steps = self._messages.send(staging.read(tensors[0]), dst, tag)
        queue = self._messages.queue(True, dst)
        call = PendingCall(queue, [steps], tensors, staging, self._me)
        self.history.add("send", tensors, call, f"{self._me}->{dst}")
        return queue.submit(call, now=False, is_needed=True)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> PendingCall:
        if modes_are_active():
            self._shown.recv(tensors, src, tag)
        self._check_peer(src)
        with unseen_by_modes():
            staging = CallTensors()
            steps = self._messages.receive(staging.write(tensors[0]), src, tag)
        queue = self._messages.queue(False, src)
        call = PendingCall(queue, [steps], tensors, staging, src)
        self.history.add("recv", tensors, call, f"{self._me}<-{src}")
        return queue.submit(call, now=False, is_needed=True)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> PendingCall:
        return self.recv(tensors, self._messages.source_with(tag), tag)

    def _check_peer(self, rank: int) -> None:
        if rank == self._me or not 0 <= rank < self._ranks:
            raise ValueError(
                f"Rank {self._me} of group {self._name} exchanges a message with rank {rank}: pass another rank of its "
                f"{self._ranks}."
            )

    # What they have in common.

    def _submit(
        self,
        kind: str,
        rows: Sequence[Steps],
        shown: Sequence[Tensor],
        result: object,
        staging: CallTensors,
        opts: CollectiveOptions,
    ) -> PendingCall:
        call = PendingCall(self._queue, rows, result, staging)
        self.history.add(kind, shown, call)
        return self._queue.submit(call, now=not getattr(opts, "asyncOp", True), is_needed=True)

    def _reduction(self, opts: CollectiveOptions, tensors: Sequence[Tensor]) -> RankReduction:
        kind, factor = c10d.reduction_of(opts.reduceOp)
        with unseen_by_modes():
            for tensor in tensors:
                check_reduction(kind, tensor.dtype)
        return RankReduction(kind, factor)

    def _check_sizes(self, kind: str, blocks: Sequence[Memory]) -> None:
        if len({block.size for block in blocks}) > 1 or len(blocks) not in (1, self._ranks + 1):
            raise ValueError(
                f"{kind} over {self._ranks} ranks with tensors of {sorted({block.size for block in blocks})} bytes in "
                f"{len(blocks) - 1} places: pass one tensor for each rank, all of one size and dtype."
            )

    def _all_reduce_sparse(self, tensors: list[Tensor], opts: CollectiveOptions) -> PendingCall:
        """Each rank's entries to all, which add them up in the order of the ranks."""
        kind, _ = c10d.reduction_of(opts.reduceOp)
        if kind not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError("all_reduce of a sparse tensor can only sum or average. Make it dense first.")
        tensor = tensors[0]
        with unseen_by_modes():
            mine = tensor.detach().coalesce()
            indices, values = mine.indices(), mine.values()
            counts = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self._ranks)]
            count = torch.full((1,), values.shape[0], dtype=torch.int64, device="cpu")
            # How many entries each rank has is not known to the others.
            self._all_gather([counts], [count], opts, None).wait()
            found = [int(one) for one in counts]
            all_indices = [indices.new_empty(indices.shape[0], number) for number in found]
            all_values = [values.new_empty(number, *values.shape[1:]) for number in found]
            # An all-gather of different sizes: an all-to-all in which a rank sends the same to everyone.
            for parts, own in ((all_indices, indices), (all_values, values)):
                staging = CallTensors()
                taken = [staging.write(part) for part in parts]
                sent = [staging.read(own)] * self._ranks
                self._submit("all_reduce", [self._all_to_all(sent, taken)], [], None, staging, opts).wait()
            total = torch.sparse_coo_tensor(
                torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape, device="cpu"
            ).coalesce()
            if kind == dist.ReduceOp.AVG:
                total = total / self._ranks
            c10d.set_sparse(tensor, total)
        call = PendingCall(self._queue, [], tensors, None)
        call.end()
        return call
