"""One rank's call of a collective, as 512 bytes that the other ranks compare with theirs.

What of the arguments has to agree is a table, by the names in torch.distributed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.agreement import CollectiveCall, LeafSpec, leaf_spec


@dataclass(frozen=True)
class Signature:
    """What of a collective's arguments has to agree.

    Attributes:
        names: Of its arguments, in order.
        tensors: Those whose number of elements, dtype and device are equal on all ranks. Lists: for each element; where
            a list's sizes differ, only the dtype and device of the other argument.
        exchanged: Of an all-to-all: what each rank takes, what it sends; dtype and device are equal on all ranks.
        root: The names of the argument that is a rank, as a global one and as one of the group.
        has_op: The reduction ``op`` is equal on all ranks.
        name: As what it is compared; "": its own name.
    """

    names: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    exchanged: tuple[str, ...] = ()
    root: tuple[str, str] | None = None
    has_op: bool = False
    name: str = ""


SRC, DST = ("src", "group_src"), ("dst", "group_dst")
GATHER_SINGLE = Signature(
    ("output_tensor", "input_tensor", "group", "async_op"),
    ("output_tensor", "input_tensor"),
    name="all_gather_into_tensor",
)
SCATTER_SINGLE = Signature(
    ("output", "input", "op", "group", "async_op"),
    ("output", "input"),
    has_op=True,
    name="reduce_scatter_tensor",
)
# The collectives that are compared; of torch 2.13's new names too. Sends and receives are not.
SIGNATURES: Mapping[str, Signature] = {
    "all_reduce": Signature(("tensor", "op", "group", "async_op"), ("tensor",), has_op=True),
    "broadcast": Signature(("tensor", "src", "group", "async_op", "group_src"), ("tensor",), root=SRC),
    "reduce": Signature(
        ("tensor", "dst", "op", "group", "async_op", "group_dst"), ("tensor",), root=DST, has_op=True
    ),
    "all_gather": Signature(("tensor_list", "tensor", "group", "async_op"), ("tensor_list", "tensor")),
    "all_gather_into_tensor": GATHER_SINGLE,
    "all_gather_single": GATHER_SINGLE,
    "gather": Signature(
        ("tensor", "gather_list", "dst", "group", "async_op", "group_dst"), ("tensor",), root=DST
    ),
    "scatter": Signature(
        ("tensor", "scatter_list", "src", "group", "async_op", "group_src"), ("tensor",), root=SRC
    ),
    "reduce_scatter": Signature(
        ("output", "input_list", "op", "group", "async_op"), ("input_list", "output"), has_op=True
    ),
    "reduce_scatter_tensor": SCATTER_SINGLE,
    "reduce_scatter_single": SCATTER_SINGLE,
    "all_to_all": Signature(
        ("output_tensor_list", "input_tensor_list", "group", "async_op"),
        exchanged=("output_tensor_list", "input_tensor_list"),
    ),
    "all_to_all_single": Signature(
        ("output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"),
        exchanged=("output", "input"),
    ),
    "barrier": Signature(("group", "async_op", "device_ids")),
    "all_gather_object": Signature(("object_list", "obj", "group")),
    "gather_object": Signature(("obj", "object_gather_list", "dst", "group", "group_dst"), root=DST),
    "broadcast_object_list": Signature(("object_list", "src", "group", "device", "group_src"), root=SRC),
    "scatter_object_list": Signature(
        ("scatter_object_output_list", "scatter_object_input_list", "src", "group", "group_src"), root=SRC
    ),
}


RECORD_BYTES = 512
DIGEST_BYTES = 8
# Of 8 bytes each, so that half of a record is left for the text.
MOST_SPLITS = 32
# What gloo runs, and torch's flight recorder shows, for these.
RUN_AS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "all_reduce",
    "all_to_all_single": "all_to_all",
    "all_gather_object": "all_gather",
    "gather_object": "all_gather",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "broadcast",
}


@dataclass(frozen=True)
class CheckedCall:
    """One rank's call of a collective.

    Attributes:
        agreed: What must be the same on all ranks.
        text: The call as people read it, with its line.
        splits: Elements taken from each rank of the group, then elements sent to each; none but for an all-to-all.
        group: Name of the process group.
        recorded_as, sizes, dtype: As torch's flight recorder will show it.
        line: Of the call.
        is_async: It returns a handle.
        is_issued: It was compared only after it was issued.
    """

    agreed: CollectiveCall
    text: str
    splits: tuple[int, ...]
    group: str
    recorded_as: str
    sizes: str
    dtype: str
    line: str
    is_async: bool
    is_issued: bool = False

    @property
    def name(self) -> str:
        """Of the function in torch.distributed."""
        return self.agreed.operation.partition("(")[0]

    def record(self) -> bytes:
        """Digest, number of splits, splits, and as much of the text as fits: 512 bytes."""
        head = self.agreed.digest.to_bytes(DIGEST_BYTES, "big")
        head += struct.pack(f">B{len(self.splits)}q", len(self.splits), *self.splits)
        text = self.text.encode()
        room = RECORD_BYTES - len(head)
        # Its end has the line.
        if len(text) > room:
            text = text[: room - 160] + b" ... " + text[-150:]
        return (head + text).ljust(RECORD_BYTES, b"\0")


@dataclass(frozen=True)
class CallRecord:
    """What came from another rank."""

    digest: bytes
    splits: tuple[int, ...]
    text: str

    @staticmethod
    def from_bytes(data: bytes) -> CallRecord:
        count = data[DIGEST_BYTES]
        end = DIGEST_BYTES + 1 + 8 * count
        splits = struct.unpack(f">{count}q", data[DIGEST_BYTES + 1 : end])
        return CallRecord(data[:DIGEST_BYTES], splits, data[end:].rstrip(b"\0").decode(errors="replace"))


def checked_call(
    signature: Signature, name: str, given: Mapping[str, object], group: dist.ProcessGroup, caller: FrameType
) -> CheckedCall:
    values = [f"op={op_name(given.get('op', dist.ReduceOp.SUM))}"] if signature.has_op else []
    if signature.root is not None:
        values.append(f"{signature.root[1]}={root_in_group(signature.root, given, group)}")
    operation = f"{name}({', '.join(values)})"
    shown = [
        leaf_spec(one) for part in signature.tensors + signature.exchanged for one in parts(given.get(part))
    ]
    text = f"{operation} of {', '.join(map(str, shown))}" if shown else operation
    tensors = [
        one for part in (*signature.tensors, *signature.exchanged) for one in tensors_in(given.get(part))
    ]
    source = tensors[-1:] if signature.exchanged or len(signature.tensors) > 1 else tensors[:1]
    line = line_shown(caller)
    return CheckedCall(
        agreed=CollectiveCall(operation, agreed_leaves(signature, given)),
        text=f"{text} ({line})",
        splits=all_to_all_splits(signature, given, group.size()),
        group=group.group_name,
        recorded_as=RUN_AS.get(name, name),
        sizes=", ".join(str(list(one.shape)) for one in source),
        dtype=leaf_spec(source[0]).kind if source else "",
        line=line,
        is_async=bool(given.get("async_op")),
    )


def agreed_leaves(signature: Signature, given: Mapping[str, object]) -> dict[str, LeafSpec]:
    """What must be equal of the tensors; a shape stands for the number of elements alone."""
    lists = [given.get(part) for part in signature.tensors if isinstance(given.get(part), (list, tuple))]
    is_uneven = any(len({one.numel() for one in tensors_in(some)}) > 1 for some in lists)
    leaves = {}
    for part in signature.tensors:
        value = given.get(part)
        for place, one in enumerate(parts(value)):
            is_list = isinstance(value, (list, tuple))
            leaves[f"{part}[{place}]" if is_list else part] = sized(one, is_list or not is_uneven)
    # Lists of one length, with one dtype.
    for part in signature.exchanged:
        leaves[part] = sized(next(iter(parts(given.get(part))), None), False)
    return leaves


def sized(leaf: object, has_size: bool) -> LeafSpec:
    spec = leaf_spec(leaf)
    return LeafSpec(
        (leaf.numel(),) if has_size and isinstance(leaf, torch.Tensor) else (), spec.kind, spec.device
    )


def all_to_all_splits(signature: Signature, given: Mapping[str, Any], size: int) -> tuple[int, ...]:
    """Elements taken from each rank of the group, then elements sent to each."""
    if not signature.exchanged or 2 * size > MOST_SPLITS:
        return ()
    taken, sent = signature.exchanged
    splits = (
        *elements_per_rank(given.get(taken), given.get("output_split_sizes"), size),
        *elements_per_rank(given.get(sent), given.get("input_split_sizes"), size),
    )
    return splits if len(splits) == 2 * size else ()


def elements_per_rank(value: object, splits: Sequence[int] | None, size: int) -> list[int]:
    if isinstance(value, (list, tuple)):
        return [one.numel() for one in tensors_in(value)]
    if not isinstance(value, torch.Tensor):
        return []
    if not splits:
        return [value.numel() // size] * size
    # Split sizes count rows of the first dim; what is compared are elements.
    row = value[0].numel() if value.shape[0] else 0
    return [int(rows) * row for rows in splits]


def splits_fit(records: Sequence[CallRecord]) -> bool:
    """What each rank of an all-to-all sends to another is what that one takes from it."""
    size = len(records)
    if any(len(record.splits) != 2 * size for record in records):
        return True
    return all(
        records[to].splits[by] == records[by].splits[size + to] for by in range(size) for to in range(size)
    )


def root_in_group(names: tuple[str, str], given: Mapping[str, Any], group: dist.ProcessGroup) -> str:
    by_global, by_group = names
    if given.get(by_group) is not None:
        return str(given[by_group])
    root = given.get(by_global)
    if root is None:
        return "0"
    try:
        return str(dist.get_group_rank(group, root))
    except (ValueError, RuntimeError):
        # torch will say so.
        return f"global rank {root}, not in the group"


def op_name(op: object) -> str:
    kind = getattr(op, "op", op)
    return str(getattr(kind, "name", type(kind).__name__))


def parts(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)


def tensors_in(value: object) -> list[torch.Tensor]:
    return [one for one in parts(value) if isinstance(one, torch.Tensor)]


def line_shown(caller: FrameType) -> str:
    """The line, by its path in the working directory."""
    file = caller.f_code.co_filename
    inside = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if inside.startswith('..') else inside}:{caller.f_lineno}"
