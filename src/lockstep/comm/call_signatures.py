"""What of a collective's arguments has to agree between ranks: a table of torch.distributed's collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
