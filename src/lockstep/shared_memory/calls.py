"""What each call of a group does: its tensors' memory, its code, and the steps of a collective, in a queue."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.shared_memory.algorithms import HostCollectives, Memory, RankReduction, check_reduction
from lockstep.shared_memory.buffers import GatheredBuffers, ReducedBuffers
from lockstep.shared_memory.call_code import call_code
from lockstep.shared_memory.channel import Channels
from lockstep.shared_memory.history import CallHistory
from lockstep.shared_memory.pending import CallQueue, PendingCall
from lockstep.shared_memory.segment import Segment
from lockstep.shared_memory.slots import CollectiveSteps
from lockstep.shared_memory.tensors import CallTensors
from lockstep.torch_internals import c10d
from lockstep.torch_internals.dispatch import unseen_by_modes

# What of torch's options is looked at; engines in C++ give them all.
CollectiveOptions = Any


def _leave(queue: CallQueue, messages: Channels, segment: Segment) -> None:
    queue.close()
    messages.close()
    segment.release()


class GroupCalls:
    """The collectives and messages of one group. Results are equal bit for bit on all ranks and from run to run.

    Attributes:
        gathered, reduced: Memory for tensors that are made to be gathered or reduced.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        name: str,
        collectives: HostCollectives,
        messages: Channels,
        history: CallHistory,
    ) -> None:
        self._me, self._ranks, self._name = rank, ranks, name
        self._collectives, self._messages, self._history = collectives, messages, history
        self.gathered, self.reduced = GatheredBuffers(collectives.slots), ReducedBuffers(collectives.slots)
        self._queue = CallQueue(f"lockstep shared memory {name}")

    def at_end_of(self, group: object, segment: Segment) -> Callable[[], object]:
        """Return what leaves the group; it is called once, by whoever is first, or when ``group`` is gone."""
        return weakref.finalize(group, _leave, self._queue, self._messages, segment)

    def all_reduce(self, tensors: list[Tensor], opts: CollectiveOptions) -> PendingCall:
        reduction = self._reduction(opts, tensors)
        with unseen_by_modes():
            staging = CallTensors()
            rows = []
            for tensor in tensors:
                block = staging.write(tensor, reads=True)
                call = call_code("all_reduce", block.flat.numel(), block.flat.dtype, reduction.kind)
                rows.append(self._collectives.all_reduce(call, block, reduction))
        return self._submit("all_reduce", rows, tensors, tensors, staging, opts)

    def all_reduce_sparse(self, tensors: list[Tensor], opts: CollectiveOptions) -> PendingCall:
        """Send each rank's entries to all, which add them up in the order of the ranks."""
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
            self.all_gather([counts], [count], opts, None).wait()
            found = [int(one) for one in counts]
            all_indices = [indices.new_empty(indices.shape[0], number) for number in found]
            all_values = [values.new_empty(number, *values.shape[1:]) for number in found]
            # An all-gather of different sizes: an all-to-all in which a rank sends the same to everyone.
            for parts, own in ((all_indices, indices), (all_values, values)):
                staging = CallTensors()
                taken = [staging.write(part) for part in parts]
                sent = [staging.read(own)] * self._ranks
                self._submit("all_reduce", [self._exchange(sent, taken)], [], None, staging, opts).wait()
            total = torch.sparse_coo_tensor(
                torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape, device="cpu"
            ).coalesce()
            if kind == dist.ReduceOp.AVG:
                total = total / self._ranks
            c10d.set_sparse(tensor, total)
        call = PendingCall(self._queue, [], tensors, None)
        call.end()
        return call

    def reduce(self, tensors: list[Tensor], opts: CollectiveOptions) -> PendingCall:
        reduction, root = self._reduction(opts, tensors), opts.rootRank
        with unseen_by_modes():
            staging = CallTensors()
            block = staging.write(tensors[0], reads=True)
            call = call_code("reduce", block.flat.numel(), block.flat.dtype, reduction.kind, root)
            steps = self._collectives.reduce(call, block, reduction, root)
        return self._submit("reduce", [steps], tensors, tensors, staging, opts)

    def broadcast(self, tensors: list[Tensor], opts: CollectiveOptions) -> PendingCall:
        with unseen_by_modes():
            staging = CallTensors()
            block = staging.write(tensors[0], reads=True)
            call = call_code("broadcast", block.flat.numel(), block.flat.dtype, root=opts.rootRank)
            steps = self._collectives.broadcast(call, block, opts.rootRank)
        return self._submit("broadcast", [steps], tensors, tensors, staging, opts)

    def barrier(self, opts: CollectiveOptions) -> PendingCall:
        steps = self._collectives.barrier(call_code("barrier"))
        return self._submit("barrier", [steps], [], [], CallTensors(), opts)

    def all_gather(
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

    def all_gather_flat(
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

    def _gather_flat(self, output: Tensor, mine: Memory, places: Sequence[int]) -> CollectiveSteps:
        collectives, use = self._collectives, self.gathered.use_of(output)
        if use is not None:
            return self.gathered.all_gather(collectives, mine, places, use)
        return collectives.all_gather(
            call_code("all_gather", mine.flat.numel(), mine.flat.dtype), mine, places
        )

    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: CollectiveOptions
    ) -> PendingCall:
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
        with unseen_by_modes():
            staging = CallTensors()
            taken = staging.write(output_tensors[0])
            sent = [staging.read(part) for part in input_tensors[0]] if self._me == opts.rootRank else []
            self._check_sizes("scatter", [taken, *sent])
            call = call_code("scatter", taken.flat.numel(), taken.flat.dtype, root=opts.rootRank)
            steps = self._collectives.scatter(call, sent, taken, opts.rootRank)
        return self._submit("scatter", [steps], output_tensors, output_tensors, staging, opts)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: CollectiveOptions
    ) -> PendingCall:
        reduction = self._reduction(opts, output_tensors)
        with unseen_by_modes():
            staging = CallTensors()
            rows = []
            for output, parts in zip(output_tensors, input_tensors, strict=True):
                out = staging.write(output)
                blocks = [staging.read(part) for part in parts]
                self._check_sizes("reduce_scatter", [out, *blocks])
                rows.append(self._reduce_parts(blocks, out, reduction, staging))
        return self._submit("reduce_scatter", rows, input_tensors[0], output_tensors, staging, opts)

    def reduce_scatter_flat(
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
                use = self.reduced.use_of(tensor)
                # A factor would have to be multiplied into the input itself, which the caller keeps.
                if use is not None and reduction.factor is None:
                    rows.append(self.reduced.reduce_scatter(self._collectives, parts, out, reduction, use))
                else:
                    rows.append(self._reduce_parts(parts, out, reduction, staging))
        return self._submit("reduce_scatter", rows, inputs, result, staging, opts)

    def _reduce_parts(
        self, parts: list[Memory], out: Memory, reduction: RankReduction, staging: CallTensors
    ) -> CollectiveSteps:
        # Two values are added in one step, whose output may be one of them. With more ranks it would
        # overwrite what is still to be added.
        if self._ranks > 2 or reduction.factor is not None:
            parts = [staging.apart_from(part, [out]) for part in parts]
        call = call_code("reduce_scatter", out.flat.numel(), out.flat.dtype, reduction.kind)
        return self._collectives.reduce_scatter(call, parts, out, reduction)

    def all_to_all(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: CollectiveOptions
    ) -> PendingCall:
        with unseen_by_modes():
            staging = CallTensors()
            taken = [staging.write(tensor) for tensor in output_tensors]
            sent = [staging.apart_from(staging.read(tensor), taken) for tensor in input_tensors]
            steps = self._exchange(sent, taken)
        return self._submit("all_to_all", [steps], input_tensors, output_tensors, staging, opts)

    def all_to_all_flat(
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
            steps = self._exchange(sent, taken)
        return self._submit("all_to_all", [steps], [input], [output], staging, opts)

    def _exchange(self, sent: Sequence[Memory], taken: Sequence[Memory]) -> CollectiveSteps:
        # Without a number of elements, which may differ between ranks.
        call = call_code("all_to_all", 0, sent[0].flat.dtype)
        return self._collectives.all_to_all(call, sent, taken)

    def _split(self, block: Memory, tensor: Tensor, splits: Sequence[int]) -> list[Memory]:
        """Return the parts of the first dimension's rows; without splits, equal ones."""
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

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> PendingCall:
        self._check_peer(dst)
        with unseen_by_modes():
            staging = CallTensors()
            steps = self._messages.send(staging.read(tensors[0]), dst, tag)
        queue = self._messages.queue(True, dst)
        call = PendingCall(queue, [steps], tensors, staging, self._me)
        self._history.add("send", tensors, call, f"{self._me}->{dst}")
        return queue.submit(call, now=False, is_needed=True)

    def receive(self, tensors: list[Tensor], src: int, tag: int) -> PendingCall:
        self._check_peer(src)
        with unseen_by_modes():
            staging = CallTensors()
            steps = self._messages.receive(staging.write(tensors[0]), src, tag)
        queue = self._messages.queue(False, src)
        call = PendingCall(queue, [steps], tensors, staging, src)
        self._history.add("recv", tensors, call, f"{self._me}<-{src}")
        return queue.submit(call, now=False, is_needed=True)

    def _check_peer(self, rank: int) -> None:
        if rank == self._me or not 0 <= rank < self._ranks:
            raise ValueError(
                f"Rank {self._me} of group {self._name} exchanges a message with rank {rank}: pass another rank of its "
                f"{self._ranks}."
            )

    def _submit(
        self,
        kind: str,
        rows: Sequence[CollectiveSteps],
        shown: Sequence[Tensor],
        result: object,
        staging: CallTensors,
        opts: CollectiveOptions,
    ) -> PendingCall:
        call = PendingCall(self._queue, rows, result, staging)
        self._history.add(kind, shown, call)
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
