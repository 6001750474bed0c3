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

        def parts(rank: int, rows_of: Callable[[int], int] = lambda to: rows) -> list[torch.Tensor]:
            """What a rank has for each of them."""
            return [
                self.values(number, rank * len(ranks) + to + 100, (rows_of(to), columns), dtype)
                for to in range(len(ranks))
            ]

        def pieces(rank: int) -> list[torch.Tensor]:
            return parts(rank, splits[rank].__getitem__)

        def mine() -> torch.Tensor:
            return self.laid_out(every[me], number)

        def empty(of: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [self.laid_out(torch.zeros_like(one), number) for one in of]

        def given(of: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [self.laid_out(one, number) for one in of]

        everyone, is_root = range(len(ranks)), me == root
        gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        # kind -> what it writes to, with which values, the function, and its arguments behind the first
        to_root, from_root = {"group_dst": root}, {"group_src": root}
        calls: dict[str, Callable[[], tuple[Any, Any, Any, tuple[Any, ...], dict[str, Any]]]] = {
            "all_reduce": lambda: (mine(), combined(every), dist.all_reduce, (reduction,), {}),
            "reduce": lambda: (
                *(mine(), combined(every) if is_root else every[me], dist.reduce, ()),
                {"op": reduction, **to_root},
            ),
            "broadcast": lambda: (mine(), every[root], dist.broadcast, (), from_root),
            "all_gather": lambda: (empty(every), every, dist.all_gather, (mine(),), {}),
            "all_gather_flat": lambda: (
                *(empty([torch.cat(every)])[0], torch.cat(every), gather_flat, (mine(),), {}),
            ),
            "reduce_scatter": lambda: (
                *(empty([every[me]])[0], combined([parts(rank)[me] for rank in everyone])),
                *(dist.reduce_scatter, (given(parts(me)), reduction), {}),
            ),
            "reduce_scatter_flat": lambda: (
                *(empty([every[me]])[0], combined([parts(rank)[me] for rank in everyone])),
                *(scatter_flat, (given([torch.cat(parts(me))])[0], reduction), {}),
            ),
            "all_to_all": lambda: (
                *(empty(wanted := [pieces(rank)[me] for rank in everyone]), wanted),
                *(dist.all_to_all, (given(pieces(me)),), {}),
            ),
            "all_to_all_flat": lambda: (
                *(torch.zeros_like(wanted := torch.cat([pieces(rank)[me] for rank in everyone])), wanted),
                dist.all_to_all_single,
                (torch.cat(pieces(me)), [splits[rank][me] for rank in everyone], splits[me]),
                {},
            ),
            "scatter": lambda: (
                *(empty([every[me]])[0], parts(root)[me], dist.scatter),
                *((given(parts(root)) if is_root else None,), from_root),
            ),
        }

        def issue() -> FuzzedCall:
            if kind == "barrier":
                return FuzzedCall(dist.barrier(group=group, async_op=is_async), lambda: None)
            if kind == "send":
                out = empty([every[me]])
                if me == root:
                    handle = dist.isend(mine(), group_dst=peer, group=group, tag=tag)
                elif me == peer:
                    handle = dist.irecv(out[0], group_src=root, group=group, tag=tag)
                return FuzzedCall(
                    handle if me in (root, peer) else None, equal(out, [every[root]] if me == peer else out)
                )
            if kind == "gather":
                out = empty(every)
                handle = dist.gather(
                    mine(), out if is_root else None, **to_root, group=group, async_op=is_async
                )
                return FuzzedCall(handle, equal(out, every if is_root else empty(every)))
            found, wanted, function, arguments, options = calls[kind]()
            handle = function(found, *arguments, **options, group=group, async_op=is_async)
            if (
                kind == "all_reduce"
                and dtype in GLOO_REDUCES
                and op != "AVG"
                and wanted.numel()
                and not is_async
            ):
                by_gloo = every[me].clone()  # its calls must have the same order on all ranks, too
                dist.all_reduce(by_gloo, reduction, group=gloo)
                assert torch.equal(by_gloo, wanted)
            lists = (found, wanted) if isinstance(found, list) else ([found], [wanted])
            return FuzzedCall(handle, equal(*lists))

        return issue
