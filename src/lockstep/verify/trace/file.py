"""A run's tensors in one safetensors file: written as the run makes them, read by parts, mapped from disk.

Files of several ranks are joined to one of whole tensors.
"""

from __future__ import annotations

import json
import math
import mmap
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from lockstep.checkpoint.format.tensors import dtype_name
from lockstep.comm.collectives import as_bytes
from lockstep.comm.layout import ShardRegion
from lockstep.config.files import JsonObject, check_plain_file, replacing
from lockstep.errors import CheckpointError, ConfigError
from lockstep.model.dtypes import DTYPES
from lockstep.verify.trace.items import TraceItem
from lockstep.verify.trace.measure import as_regions

FORMAT = "lockstep trace 2"
DAMAGED = (ValueError, TypeError, KeyError, RecursionError)
"""What reading JSON raises that is torn, or of other contents than it should be."""
_COPY_BYTES = 16 << 20


class TraceWriter:
    """Appends tensors to a file beside ``path``; ``close`` makes a safetensors file of them.

    Memory does not grow with the tensors: a header with their places is all that is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # The header comes first and has all offsets: until they are known, data is written beside.
        self._data = path.with_suffix(".data")
        self._file = self._data.open("wb")
        self._entries: dict[str, JsonObject] = {}
        self._end = 0

    def __contains__(self, item: TraceItem) -> bool:
        return item.key in self._entries

    def add(self, item: TraceItem, tensor: torch.Tensor) -> None:
        """Append a tensor of any shape, device and dtype; of an item that is there already nothing is written."""
        if item in self:
            return
        values = plain(tensor)
        data = as_bytes(values).numpy()
        self._file.write(data)  # type: ignore[arg-type]  # numpy arrays are buffers
        begin, self._end = self._end, self._end + data.nbytes
        self._entries[item.key] = {
            "dtype": dtype_name(values, item.name),
            "shape": list(values.shape),
            "data_offsets": [begin, self._end],
        }

    def close(self, facts: Mapping[str, object]) -> None:
        """Write the file. ``facts``: what else is to be known of the run, as JSON has it."""
        self._file.close()
        about = {"format": FORMAT, "order": json.dumps(list(self._entries)), "facts": json.dumps(facts)}
        with self._data.open("rb") as data:
            _write(self._path, {"__metadata__": about, **self._entries}, data)
        self._data.unlink()


class Trace:
    """A trace that was written. It iterates over the items to compare.

    Raises:
        ConfigError: ``path`` is no trace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_plain_file(str(path))
            # safe_open checks that the header is right.
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._entries: dict[str, JsonObject] = json.loads(file.read(length))
                # Copy on write: torch wants memory that it may write to, and the file must stay what it is.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._begin = 8 + length
            if about.get("format") != FORMAT or not {"facts", "order"} <= about.keys():
                raise ValueError(f"it is not a trace of a run ({FORMAT})")
            self.facts: JsonObject = json.loads(about["facts"])
            self._places = {key: place for place, key in enumerate(json.loads(about["order"]))}
            if type(self.facts) is not dict or {"__metadata__", *self._places} != set(self._entries):
                raise ValueError("its list of tensors or its facts are not those of its tensors")
        except (OSError, SafetensorError, CheckpointError, *DAMAGED) as error:
            raise ConfigError(
                f"{path} cannot be read as a trace: {str(error).rstrip('.')}. Write one with `lockstep check --record`."
            ) from None

    @cached_property
    def _items(self) -> list[TraceItem]:
        # A script may end between the batches of two ranks: what it began of another step, no other run makes.
        made = self.facts.get("made", math.inf)
        return [item for item in map(TraceItem.from_key, self._places) if item.step <= made]

    def __contains__(self, item: TraceItem) -> bool:
        return item.key in self._places

    def __iter__(self) -> Iterator[TraceItem]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._places)

    def copy(self, path: Path, facts: Mapping[str, object]) -> None:
        """Write the trace to another file, with further facts. Raises OSError."""
        with self.path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            header["__metadata__"]["facts"] = json.dumps({**self.facts, **facts})
            _write(path, header, file)

    def position(self, item: TraceItem) -> int:
        """Return the place in the run at which it came."""
        return self._places[item.key]

    def shape(self, item: TraceItem) -> tuple[int, ...]:
        return tuple(self._entries[item.key]["shape"])

    def has_known_type(self, item: TraceItem) -> bool:
        """Return whether torch has a type for its elements."""
        return self._entries[item.key]["dtype"] in DTYPES

    def is_float(self, item: TraceItem) -> bool:
        """Return whether its numbers are rounded."""
        return str(self._entries[item.key]["dtype"]).startswith(("F", "BF", "C"))

    def tensor(self, item: TraceItem) -> torch.Tensor:
        """Return all of it: memory that is mapped from the file, which nobody changes."""
        entry = self._entries[item.key]
        dtype, (begin, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
        if begin == end:
            return torch.empty(entry["shape"], dtype=dtype)
        flat = torch.frombuffer(self._data, dtype=torch.uint8, count=end - begin, offset=self._begin + begin)
        # A view in this dtype must begin at a multiple of its elements' size.
        if (self._begin + begin) % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).reshape(entry["shape"])

    def release(self, item: TraceItem) -> None:
        """Let go of the memory of an item, until it is read again."""
        begin, end = (self._begin + place for place in self._entries[item.key]["data_offsets"])
        # The kernel takes whole pages. A neighbour on the first one is read from the file again.
        begin -= begin % mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def part(self, item: TraceItem, region: ShardRegion) -> torch.Tensor:
        """Return the elements of a region."""
        if not region.shape:
            return self.tensor(item)
        ranges = tuple(
            slice(start, start + count) for start, count in zip(region.offsets, region.shape, strict=True)
        )
        return self.tensor(item)[ranges]

    def held(self, item: TraceItem, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> torch.Tensor:
        """Return what a rank has of an item if it has these boxes of it; none: all."""
        regions = as_regions(pairs)
        # One box is a view of the trace; several need a tensor that has them beside each other.
        if len(regions) < 2:
            return self.part(item, regions[0]) if regions else self.tensor(item)
        ends = ([a + b for a, b in zip(region.inside, region.shape, strict=True)] for region in regions)
        shape = tuple(map(max, zip(*ends, strict=True)))
        whole = self.tensor(item)
        held = whole.new_empty((*shape, *whole.shape[len(shape) :]))
        for region in regions:
            region.local_view(held).copy_(self.part(item, region))
        return held


def _write(path: Path, header: Mapping[str, object], data: BinaryIO) -> None:
    """Return a safetensors file of a header and what ``data`` has from here on."""
    content = json.dumps(header).encode()
    # Data begins at a multiple of 8, as in all safetensors files.
    content += b" " * (-len(content) % 8)
    with replacing(path) as file:
        file.write(len(content).to_bytes(8, "little") + content)
        shutil.copyfileobj(data, file, _COPY_BYTES)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory, contiguous, without a gradient, complex numbers as pairs."""
    values = tensor.detach()
    if values.is_sparse or values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_quantized:
        values = values.dequantize()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.resolve_neg().cpu().contiguous()


def join_traces(paths: Sequence[Path], target: Path) -> Trace:
    """Put the parts of each tensor together; of copies the first rank's is taken. What is not whole is left out.

    Args:
        paths: By rank.
    """
    traces = [Trace(path) for path in paths]
    order: dict[TraceItem, None] = {}
    for trace in traces:
        order.update(dict.fromkeys(trace))
    writer = TraceWriter(target)
    for item in sorted(order, key=lambda item: min(t.position(item) for t in traces if item in t)):
        whole = _assemble(item, [trace for trace in traces if item in trace])
        if whole is not None:
            writer.add(item, whole)
    writer.close({**traces[0].facts, "parts": {}})
    return Trace(target)


def _assemble(item: TraceItem, traces: Sequence[Trace]) -> torch.Tensor | None:
    for trace in traces:
        if item.key not in trace.facts["parts"]:
            return trace.tensor(item)
    shape = traces[0].facts["parts"][item.key][0]
    whole, is_there = traces[0].tensor(item).new_zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for trace in traces:
        part = trace.tensor(item)
        for region in as_regions(trace.facts["parts"][item.key][1]):
            region.whole_view(whole).copy_(region.local_view(part))
            region.whole_view(is_there).fill_(True)
    return whole if bool(is_there.all()) else None
