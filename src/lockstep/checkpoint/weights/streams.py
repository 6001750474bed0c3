"""Tensors written to one safetensors file, or read from chunks in several, as streams.

Memory is bounded: what is written is produced meanwhile, and what is read comes slab by slab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

import torch

from lockstep.checkpoint.format.documents import Chunk, record_of
from lockstep.checkpoint.format.index import ChunkMetadata, Index
from lockstep.checkpoint.format.tensors import TensorFile, TensorReader, elements_of
from lockstep.checkpoint.store.local import LocalStore
from lockstep.errors import CheckpointError, LockstepError
from lockstep.model.dtypes import NAMES as DTYPE_NAMES

Elements = Callable[[str], Iterable[Chunk]]
"""The elements of a tensor by its name, in order, as bytes. Asked for once, in the order of the files."""


def without_elements(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors without elements, which say dtype and shape."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()
    }


def check_room(directory: str, needed: int) -> None:
    """Raise CheckpointError unless this many bytes are free."""
    free = LocalStore().free_bytes(directory)
    if free is not None and free < needed:
        raise CheckpointError(
            f"{directory} needs {needed} bytes, but {free} are free there. Make room or save elsewhere; weights that "
            "were there before are untouched."
        )


def write_tensor_file(
    path: str, tensors: Mapping[str, torch.Tensor], elements: Elements, verified: bool = False
) -> None:
    """Write a safetensors file as a stream, on the disk when this returns; ``verified``: read it again.

    Raises:
        CheckpointError: it could not be written; names file and tensor.
    """
    store = LocalStore()
    current = ""

    def content() -> Iterable[Chunk]:
        nonlocal current
        yield TensorFile(dict(tensors)).header()
        for current, tensor in tensors.items():
            written = 0
            for chunk in elements(current):
                written += len(chunk)
                yield chunk
            # The header, which is written by now, counts on this length.
            if written != tensor.nbytes:
                raise CheckpointError(
                    f"{path}: {current} gave {written} bytes instead of {tensor.nbytes}. Do not change weights "
                    "while they are saved."
                )

    try:
        record = store.write(path, content())
        if verified and record_of(store.blocks(path)) != record:
            raise CheckpointError(
                f"{path} has other bytes than were written to it. Save to another disk; weights that were there before "
                "are untouched."
            )
    except LockstepError:
        raise
    except Exception as error:
        raise unwritten(path, error, current) from error


def unwritten(path: str, error: Exception, tensor: str = "") -> CheckpointError:
    """Return the error for a file of weights, and the tensor in it, that could not be written."""
    where = f" at tensor {tensor}" if tensor else ""
    return CheckpointError(
        f"{path} could not be written{where}: {error}. Make room there or mend its permissions, or save elsewhere; "
        "weights that were there before are untouched."
    )


SLAB_BYTES = 8 << 20
CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a conversion changes. Eight bits and fewer come with scales of their own, and stay."""

TensorRegion = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths, by dimension."""


def slabs(shape: tuple[int, ...], limit: int) -> Iterator[TensorRegion]:
    """Regions of at most ``limit`` elements that together are a tensor of this shape, in the order of its elements."""
    if not math.prod(shape):
        return
    if not shape:
        yield (), ()
        return
    # Whole in the dims behind ``dim``, cut along it, one index in each before it: so elements stay in their order.
    dim = 0
    while dim < len(shape) - 1 and math.prod(shape[dim + 1 :]) > limit:
        dim += 1
    rest = shape[dim + 1 :]
    step = max(1, limit // math.prod(rest))
    for before in product(*(range(size) for size in shape[:dim])):
        for start in range(0, shape[dim], step):
            offsets = (*before, start, *(0 for _ in rest))
            yield offsets, (*(1 for _ in before), min(step, shape[dim] - start), *rest)


def overlap(region: TensorRegion, chunk: ChunkMetadata) -> TensorRegion | None:
    """Return what of a tensor is both in the region and in the chunk."""
    starts = tuple(map(max, region[0], chunk.offsets))
    ends = [
        min(offset + length, other + size)
        for offset, length, other, size in zip(*region, chunk.offsets, chunk.shape, strict=True)
    ]
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, lengths) if all(length > 0 for length in lengths) else None


class ChunkedTensors:
    """Tensors by name, of which the files in ``root`` hold the chunks.

    ``dtype`` is that in which tensors of the dtypes ``CASTABLE`` are given. Whatever the size of a tensor or a chunk,
    only a few slabs of ``SLAB_BYTES`` are in memory: what of the files is mapped, a slab, its cast, and what checks it.
    """

    def __init__(self, root: str, index: Index, dtype: torch.dtype | None = None) -> None:
        self.root = root
        self.index = index
        self._dtype = dtype
        self._readers: dict[str, TensorReader] = {}
        self._mapped_bytes = 0

    @property
    def described(self) -> Mapping[str, torch.Tensor]:
        """The tensors without elements."""
        return {
            name: torch.empty(entry.shape, dtype=self._dtype_of(name), device="meta")
            for name, entry in self.index.items()
        }

    def _dtype_of(self, name: str) -> torch.dtype:
        dtype = self.index[name].torch_dtype
        return self._dtype if self._dtype is not None and dtype in CASTABLE else dtype

    def elements(self, name: str) -> Iterator[memoryview]:
        """Yield the elements of a tensor in their order, as bytes, slab after slab; each is valid until the next.

        Raises:
            CheckpointError: a file does not have what it should, or a number is too large for the dtype.
        """
        entry, dtype = self.index[name], self._dtype_of(name)
        limit = SLAB_BYTES // max(entry.torch_dtype.itemsize, dtype.itemsize)
        # Memory that is used again and again: allocators keep some of what they are given back.
        slab = torch.empty(min(limit, math.prod(entry.shape)), dtype=entry.torch_dtype)
        cast = slab if dtype == slab.dtype else torch.empty_like(slab, dtype=dtype)
        for region in slabs(entry.shape, limit):
            count = math.prod(region[1])
            self._fill(slab[:count].view(region[1]), name, region)
            if cast is not slab:
                _cast(slab[:count], cast[:count], name)
            yield elements_of(cast[:count])

    def _fill(self, slab: torch.Tensor, name: str, region: TensorRegion) -> None:
        """Read what of a tensor is in the region."""
        filled = 0
        for chunk in self.index[name].pieces:
            common = overlap(region, chunk)
            if common is None:
                continue
            starts, lengths = common
            inside = [start - offset for start, offset in zip(starts, chunk.offsets, strict=True)]
            part = self._read(chunk, inside, lengths)
            into = slab
            for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                into = into.narrow(dim, start - region[0][dim], length)
            if part.dtype != slab.dtype or part.shape != into.shape:
                raise CheckpointError(
                    f"{self.root}/{chunk.file}: {chunk.key} is {_tensor_text(part)} instead of {_tensor_text(into)}. "
                    "Load another checkpoint."
                )
            into.copy_(part)
            filled += part.numel()
        if filled != slab.numel():
            raise CheckpointError(
                f"{self.root}: the pieces of {name} leave out or repeat elements. Load another checkpoint."
            )

    def _read(self, chunk: ChunkMetadata, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        # What was read stays in memory as long as its file is open.
        if self._mapped_bytes > SLAB_BYTES:
            self._readers.clear()
            self._mapped_bytes = 0
        path = f"{self.root}/{chunk.file}"
        if path not in self._readers:
            self._readers[path] = TensorReader(path)
        part = self._readers[path].read(chunk.key, offsets, lengths)
        self._mapped_bytes += part.nbytes
        return part


def _cast(slab: torch.Tensor, cast: torch.Tensor, name: str) -> None:
    """Copy numbers into another dtype. Raises CheckpointError where one becomes infinite."""
    cast.copy_(slab)
    # From fp16 to bf16, say, the range grows, and no number can become infinite.
    narrower = torch.finfo(cast.dtype).max < torch.finfo(slab.dtype).max
    if narrower and (cast.isinf() & ~slab.isinf()).any():
        largest = slab[cast.isinf() & ~slab.isinf()][0].item()
        raise CheckpointError(
            f"{name} holds {largest:g}, which is too large for {DTYPE_NAMES[cast.dtype]}. Convert to another "
            "dtype."
        )


def _tensor_text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
