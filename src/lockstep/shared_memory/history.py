"""What a group's calls were and which are not done, in the form in which torch's flight recorder has its entries."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

REMEMBERED = 64
RECORDED_DTYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
}


class RememberedCall(NamedTuple):
    """``pair``: of a send or receive, the two ranks in the group; "" of a collective."""

    number: int
    kind: str
    sizes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None
    created_ns: int
    # Not the work itself, which keeps the tensors of its call.
    work: weakref.ref[dist.Work]
    pair: str

    def is_done(self) -> bool:
        return bool(getattr(self.work(), "done", True))


class CallHistory:
    """The last calls of one group, oldest first; those that are not done are kept longer than others."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[RememberedCall] = deque()
        self._numbers = {False: 0, True: 0}

    def add(self, kind: str, tensors: Sequence[torch.Tensor], work: dist.Work, pair: str = "") -> None:
        number = self._numbers[bool(pair)] = self._numbers[bool(pair)] + 1
        sizes = tuple(tuple(tensor.shape) for tensor in tensors[:5])
        dtype = tensors[0].dtype if tensors else None
        if len(self._calls) >= REMEMBERED and self._calls[0].is_done():
            self._calls.popleft()
        self._calls.append(
            RememberedCall(number, kind, sizes, dtype, time.time_ns(), weakref.ref(work), pair)
        )

    def oldest_pending(self) -> str:
        """Return the call that is waited for, as people read it."""
        for call in list(self._calls):
            if not call.is_done():
                sizes = ", ".join(str(list(size)) for size in call.sizes)
                return f"{call.kind}{f' of {sizes}' if sizes else ''} (number {call.number} of group {self._name})"
        return f"a collective of group {self._name}"

    def entries(self) -> list[Mapping[str, object]]:
        """Return the calls in the JSON form of torch's flight recorder."""
        return [
            {
                "profiling_name": f"shm:{call.kind} {call.pair}".rstrip(),
                "process_group": [self._name, ""],
                "collective_seq_id": 0 if call.pair else call.number,
                "p2p_seq_id": call.number if call.pair else 0,
                "is_p2p": bool(call.pair),
                "input_sizes": [list(size) for size in call.sizes],
                "input_dtypes": [RECORDED_DTYPES.get(call.dtype, str(call.dtype))] if call.dtype else [],
                "time_created_ns": call.created_ns,
                "retired": call.is_done(),
            }
            for call in list(self._calls)
        ]
