"""Random collectives in random groups, each against a sum over what all ranks had, and against gloo where it can.

All ranks draw the same calls from one seed. What a rank puts into call ``n`` follows from the seed, ``n`` and the rank,
so that every rank knows the inputs of all. Values are small integers: sums of them are exact in every dtype. Some calls
are issued asynchronously, several at once in several groups, by each rank in an order of its own among the groups.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep import shared_memory

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
MOVED = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e4m3fn, torch.uint16)
GLOO_REDUCES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_flat", "gather", "reduce_scatter",
         "reduce_scatter_flat", "all_to_all", "all_to_all_flat", "scatter", "barrier", "send")  # fmt: skip
Op = dist.ReduceOp
COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda x: x.sum(0),
    "AVG": lambda x: x.mean(0),
    "PRODUCT": lambda x: x.prod(0),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
}


@dataclass
class FuzzedCall:
    """One call: ``check`` compares what it wrote, once its handle was waited for."""

    handle: Any
    check: Callable[[], None]


class Fuzzer:
    """The calls of one rank. ``largest``: elements of the largest tensors; ``subgroups``: beside two of all ranks."""

    def __init__(self, seed: int, largest: int, subgroups: int = 3) -> None:
        shared_memory.register()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.seed, self.largest = seed, largest
        self.common = random.Random(seed)
        self.own = random.Random(seed * 1000 + self.rank)
        everyone = list(range(self.size))
        members = [everyone, everyone]
        for _ in range(subgroups if self.size > 2 else 0):
            members.append(sorted(self.common.sample(everyone, self.common.randint(2, self.size))))
        wait = timedelta(seconds=60)
        self.groups = [
            (ranks, dist.new_group(ranks, backend="shm", timeout=wait), dist.new_group(ranks, backend="gloo"))
            for ranks in members
        ]

    def run(self, calls: int) -> int:
        """Make so many calls, in batches; how many this rank took part in."""
        number = made = 0
        while number < calls:
            batch: list[list[Callable[[], FuzzedCall]]] = [[] for _ in self.groups]
            count = self.common.choice((1, 1, 1, 3, 6))
            for _ in range(count):
                number += 1
                index = self.common.randrange(len(self.groups))
                plan = self.plan(number, *self.groups[index], at_once=count > 1)
                if self.rank in self.groups[index][0]:
                    batch[index].append(plan)
            issued = []
            while any(batch):
                group = self.own.choice([one for one in batch if one])
                issued.append(group.pop(0)())
            self.own.shuffle(issued)
            for call in issued:
                if call.handle is not None:
                    call.handle.wait()
                call.check()
            made += len(issued)
        return made

    def values(self, number: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What a rank has for a call; non-contiguous for some."""
        generator = torch.Generator().manual_seed(self.seed * 7919 + number * 64 + rank)
        values = torch.randint(0, 3, tuple(shape), generator=generator)
        if dtype.is_complex:
            return torch.complex(values.float(), (2 - values).float()).to(dtype)
        return values.to(dtype)

    def laid_out(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The same values, for one in three calls in memory that is not contiguous."""
        if number % 3 or tensor.dim() < 2:
            return tensor.clone()
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]

    def plan(
        self, number: int, ranks: list[int], group: Any, gloo: Any, at_once: bool
    ) -> Callable[[], FuzzedCall]:
        """Draw a call, alike on all ranks; the function makes it on this one."""
        draw = self.common
        kind = draw.choice(KINDS)
        is_async = draw.random() < 0.5 or at_once
        reduces = "reduce" in kind
        dtype = draw.choice((*FLOATS, *INTEGERS, *COMPLEX) if reduces else MOVED)
        ops = ["SUM"] if dtype.is_complex else ["SUM", "PRODUCT", "MIN", "MAX"]
        op = draw.choice([*ops, "AVG"] if dtype in FLOATS[:2] else ops)
        rows = draw.choice((0, 1, 2, 3, 7))
        columns = (
            draw.choice((0, 1, 5, 64, 1000)) if draw.random() < 0.9 else draw.randint(1, self.largest // 8)
        )
        root = draw.randrange(len(ranks))
        peer = (root + draw.randrange(1, len(ranks))) % len(ranks)
        splits = [[draw.choice((0, 1, 2, 5)) for _ in ranks] for _ in ranks]
        tag = draw.choice((0, 0, 7))
        if self.rank not in ranks:
            return lambda: FuzzedCall(None, lambda: None)
        me = ranks.index(self.rank)
        every = [self.values(number, rank, (rows, columns), dtype) for rank in range(len(ranks))]
        use = self.laid_out
        reduction = getattr(Op, op)

        def equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Callable[[], None]:
            what = (
                f"call {number}: {kind} {op} {dtype} {rows}x{columns} of {ranks}, async {is_async}, rank {me}"
            )

            def check() -> None:
                for one, other in zip(found, wanted, strict=True):
                    assert one.dtype == other.dtype, what
                    as_bytes = (
                        torch.empty(t.shape, dtype=t.dtype).copy_(t).view(-1).view(torch.uint8)
                        for t in (one, other)
                    )
                    assert torch.equal(*as_bytes), f"{what}\n{one}\n{other}"

            return check

        def combined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            stacked = torch.stack(list(parts))
            if dtype in (torch.float16, torch.bfloat16):
                return COMBINE[op](stacked.float()).to(dtype)
            return COMBINE[op](stacked).to(dtype) if len(stacked) else stacked

        def all_reduce() -> FuzzedCall:
            x = use(every[me], number)
            handle = dist.all_reduce(x, reduction, group=group, async_op=is_async)
            wanted = combined(every)
            if dtype in GLOO_REDUCES and op != "AVG" and wanted.numel():
                by_gloo = every[me].clone()
                if not is_async:  # gloo's calls must have the same order on all ranks, too
                    dist.all_reduce(by_gloo, reduction, group=gloo)
                    assert torch.equal(by_gloo, wanted)
            return FuzzedCall(handle, equal([x], [wanted]))

        def reduce() -> FuzzedCall:
            x = use(every[me], number)
            handle = dist.reduce(x, group_dst=root, op=reduction, group=group, async_op=is_async)
            return FuzzedCall(handle, equal([x], [combined(every) if me == root else every[me]]))

        def broadcast() -> FuzzedCall:
            x = use(every[me], number)
            handle = dist.broadcast(x, group_src=root, group=group, async_op=is_async)
            return FuzzedCall(handle, equal([x], [every[root]]))

        def all_gather() -> FuzzedCall:
            out = [use(torch.zeros_like(one), number) for one in every]
            handle = dist.all_gather(out, use(every[me], number), group=group, async_op=is_async)
            return FuzzedCall(handle, equal(out, every))

        def all_gather_flat() -> FuzzedCall:
            out = use(torch.cat([torch.zeros_like(one) for one in every]), number)
            call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            handle = call(out, use(every[me], number), group=group, async_op=is_async)
            return FuzzedCall(handle, equal([out], [torch.cat(every)]))

        def gather() -> FuzzedCall:
            out = [use(torch.zeros_like(one), number) for one in every] if me == root else None
            handle = dist.gather(use(every[me], number), out, group_dst=root, group=group, async_op=is_async)
            return FuzzedCall(handle, equal(out or [], every if me == root else []))

        def parts_of(rank: int) -> list[torch.Tensor]:
            return [
                self.values(number, rank * len(ranks) + part + 100, (rows, columns), dtype)
                for part in range(len(ranks))
            ]

        def reduce_scatter() -> FuzzedCall:
            out = use(torch.zeros_like(every[me]), number)
            given = [use(part, number) for part in parts_of(me)]
            handle = dist.reduce_scatter(out, given, reduction, group=group, async_op=is_async)
            return FuzzedCall(
                handle, equal([out], [combined([parts_of(rank)[me] for rank in range(len(ranks))])])
            )

        def reduce_scatter_flat() -> FuzzedCall:
            out = use(torch.zeros_like(every[me]), number)
            call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            given = use(torch.cat(parts_of(me)), number)
            handle = call(out, given, reduction, group=group, async_op=is_async)
            return FuzzedCall(
                handle, equal([out], [combined([parts_of(rank)[me] for rank in range(len(ranks))])])
            )

        def pieces(rank: int) -> list[torch.Tensor]:
            return [
                self.values(number, rank * len(ranks) + to + 100, (splits[rank][to], columns), dtype)
                for to in range(len(ranks))
            ]

        def all_to_all() -> FuzzedCall:
            wanted = [pieces(rank)[me] for rank in range(len(ranks))]
            out = [use(torch.zeros_like(one), number) for one in wanted]
            given = [use(one, number) for one in pieces(me)]
            handle = dist.all_to_all(out, given, group=group, async_op=is_async)
            return FuzzedCall(handle, equal(out, wanted))

        def all_to_all_flat() -> FuzzedCall:
            wanted = torch.cat([pieces(rank)[me] for rank in range(len(ranks))])
            out = torch.zeros_like(wanted)
            taken = [splits[rank][me] for rank in range(len(ranks))]
            given = torch.cat(pieces(me))
            handle = dist.all_to_all_single(out, given, taken, splits[me], group=group, async_op=is_async)
            return FuzzedCall(handle, equal([out], [wanted]))

        def scatter() -> FuzzedCall:
            out = use(torch.zeros_like(every[me]), number)
            given = [use(part, number) for part in parts_of(root)] if me == root else None
            handle = dist.scatter(out, given, group_src=root, group=group, async_op=is_async)
            return FuzzedCall(handle, equal([out], [parts_of(root)[me]]))

        def barrier() -> FuzzedCall:
            return FuzzedCall(dist.barrier(group=group, async_op=is_async), lambda: None)

        def send() -> FuzzedCall:
            if me == root:
                handle = dist.isend(use(every[me], number), group_dst=peer, group=group, tag=tag)
                return FuzzedCall(handle, lambda: None)
            if me == peer:
                x = use(torch.zeros_like(every[me]), number)
                handle = dist.irecv(x, group_src=root, group=group, tag=tag)
                return FuzzedCall(handle, equal([x], [every[root]]))
            return FuzzedCall(None, lambda: None)

        return locals()[kind]
