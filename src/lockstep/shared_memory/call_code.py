"""A collective as one number of 64 bits, which ranks compare and which can be read back."""

from __future__ import annotations

import torch
import torch.distributed as dist

KINDS = (
    "barrier",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "reduce_scatter",
    "all_to_all",
    "scatter",
    "sizes",
)
REDUCTIONS = (
    None,
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.BAND,
    dist.ReduceOp.BOR,
    dist.ReduceOp.BXOR,
    dist.ReduceOp.PREMUL_SUM,
)
DTYPES: tuple[torch.dtype | None, ...] = (
    None, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.uint16,
    torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip
NUMBER_OF: dict[object, int] = {
    **{kind: number for number, kind in enumerate(KINDS)},
    **{dtype: number for number, dtype in enumerate(DTYPES)},
}
REDUCTION_NUMBERS: dict[object, int] = {reduction: number for number, reduction in enumerate(REDUCTIONS)}
SIZE_BITS, ROOT_BITS, REDUCTION_BITS, DTYPE_BITS = 38, 12, 4, 5


def call_code(
    kind: str, size: int = 0, dtype: torch.dtype | None = None, reduction: object = None, root: int = 0
) -> int:
    """Return the code of a collective on ``size`` elements; sizes of 2**38 and more are counted from 0 again."""
    # From the highest bits to the lowest: kind | dtype | reduction | root | size
    code = NUMBER_OF[kind] << DTYPE_BITS | NUMBER_OF.get(dtype, 0)
    code = code << REDUCTION_BITS | REDUCTION_NUMBERS[reduction]
    code = code << ROOT_BITS | root
    return code << SIZE_BITS | size % (1 << SIZE_BITS)


def read_code(code: int) -> str:
    """Return what people read of a code."""
    size, code = code % (1 << SIZE_BITS), code >> SIZE_BITS
    root, code = code % (1 << ROOT_BITS), code >> ROOT_BITS
    reduction, code = REDUCTIONS[code % (1 << REDUCTION_BITS)], code >> REDUCTION_BITS
    dtype, kind = DTYPES[code % (1 << DTYPE_BITS)], KINDS[code >> DTYPE_BITS]
    arguments = []
    if reduction is not None:
        arguments.append(f"op={getattr(reduction, 'name', reduction)}")
    if kind in ("broadcast", "reduce", "gather", "scatter"):
        arguments.append(f"group rank {root} as root")
    of = "" if dtype is None else f" of {size} {str(dtype).removeprefix('torch.')} elements"
    return f"{kind}({', '.join(arguments)}){of}"
