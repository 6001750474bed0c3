"""Files of ``torch.save``: where their pickles and the bytes of their storages are.

The zip form is one archive of stored, never compressed records; the older form is a row of pickles with the
storages behind them. Anything else that starts like a pickle is one plain pickle.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.compat.checkpoints.tensors import DTYPES, MalformedError, MappedFile, Storage, UnreadableError

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
# Magic number, protocol, facts of the machine, the value, the keys of its storages.
LEGACY_PICKLES = 5
# Bytes of it, without name and extra field.
_LOCAL_HEADER = 30
MAX_PICKLE_BYTES = 2**31
_TYPES = {
    "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16",
    "IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32", "DoubleStorage": "float64", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
STORAGES = {
    (module, name): DTYPES[dtype]
    for name, dtype in _TYPES.items()
    for module in ("torch", "torch.cuda", "torch.storage")
}
"""The names that stand for a kind of storage."""


class FileSlice(io.RawIOBase):
    """``length`` bytes of an open file from ``start``, as a file of its own."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self.descriptor = descriptor
        self.start = start
        self.length = length
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence] + offset
        if at < 0:
            raise ValueError("seek before the start")
        self.at = at
        return at

    def readinto(self, buffer: Any) -> int:
        data = os.pread(
            self.descriptor, max(0, min(len(buffer), self.length - self.at)), self.start + self.at
        )
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def bytes_at(self, start: int, length: int) -> bytes:
        """Return at most ``length`` bytes from ``start``."""
        self.seek(start)
        return self.read(length) or b""


Place = tuple[int, int, int | None]
"""Where a storage starts in its file, how many bytes are there, and their checksum."""


@dataclass(frozen=True)
class Container:
    """The pickles of a file: where the first one starts, how many follow each other, and where the last one must end.

    ``records`` of an archive are by the keys of its storages.
    """

    part: FileSlice
    start: int
    end: int
    pickles: int = 1
    records: Mapping[str, zipfile.ZipInfo] = field(default_factory=dict)

    def value(self, values: Sequence[Any], end: int) -> object:
        """Return what the file holds, of its pickled ``values``. Raises UnreadableError if these are not torch's."""
        if self.pickles == 1:
            if end != self.end:
                raise MalformedError(f"{self.end - end} bytes follow its pickle")
            return values[0]
        magic, protocol, system, value, _ = values
        if magic != {"$": "int", "value": hex(LEGACY_MAGIC)} or protocol != LEGACY_PROTOCOL:
            raise UnreadableError("it has an unknown version of the form of torch before 1.6")
        if isinstance(system, dict) and ["little_endian", False] in system.get("pairs", ()):
            raise UnreadableError("it was written by a big-endian machine")
        return value

    def storages(
        self, names: Sequence[object], values: Sequence[Any], end: int, file: MappedFile
    ) -> list[Storage]:
        """Return the storages that the pickles name. Raises UnreadableError if one is not as it is named."""
        named = [_storage_id(name) for name in names]
        dtypes = {key: dtype for dtype, key, _ in named}
        places = (
            self._legacy_places(values[-1], dtypes, end) if self.pickles > 1 else self._record_places(dtypes)
        )
        found = []
        for dtype, key, count in named:
            if dtypes[key] != dtype:
                raise UnreadableError(f"storage {key[:40]!r} is used as {dtype} and as {dtypes[key]}")
            nbytes = count * dtype.itemsize
            start, available, crc32 = places.get(key, (0, -1, None))
            # An archive's record may have room to spare; its checksum is of all of it.
            if available < nbytes or (self.pickles > 1 and available != nbytes):
                raise MalformedError(
                    f"storage {key[:40]!r} should have {nbytes} bytes, but the file has {available}"
                )
            found.append(Storage(file, dtype, start, nbytes, crc32 if available == nbytes else None))
        return found

    def _record_places(self, keys: Iterable[str]) -> dict[str, Place]:
        infos = {key: self.records[key] for key in keys if key in self.records}
        return {key: (_data_start(self.part, info), info.file_size, info.CRC) for key, info in infos.items()}

    def _legacy_places(self, keys: Any, dtypes: Mapping[str, torch.dtype], end: int) -> dict[str, Place]:
        """Find the places of storages, each of which has the number of its elements in 8 bytes, then the elements."""
        places: dict[str, Place] = {}
        if not isinstance(keys, list) or any(not isinstance(key, str) or key not in dtypes for key in keys):
            raise MalformedError("its list of storages is not the one that its tensors use")
        for key in keys:
            count = int.from_bytes(self.part.bytes_at(end - self.part.start, 8), "little")
            places[key] = end + 8, count * dtypes[key].itemsize, None
            end += 8 + places[key][1]
        if end > self.part.start + self.part.length:
            raise MalformedError("its storages go beyond the end of the file")
        return places


def _storage_id(name: Any) -> tuple[torch.dtype, str, int]:
    """dtype, key and number of elements of ``("storage", type, key, device, count)``."""
    fields = name["items"] if isinstance(name, dict) and name.get("$") == "tuple" else []
    if len(fields) not in (5, 6) or fields[0] != "storage" or fields[5:] not in ([], [None]):
        raise UnreadableError("it refers to something other than a storage")
    _, kind, key, _, count = fields[:5]
    known = STORAGES.get(tuple(kind["items"])) if isinstance(kind, dict) and kind.get("$") == "name" else None
    if known is None or not isinstance(key, str) or type(count) is not int or count < 0:
        raise UnreadableError("it refers to a storage of an unknown type, name or size")
    return known, key, count


def find_pickles(part: FileSlice) -> Container:
    """Return where the pickles of a file are. Raises UnreadableError if it has none."""
    start = part.bytes_at(0, 2)
    if start == b"PK":
        return _zip(part)
    if not start:
        raise MalformedError("it is empty")
    if part.bytes_at(257, 5) == b"ustar":
        raise UnreadableError("it is a tar file of torch before 0.4; load and save it again with that torch")
    if start[:1] != b"\x80":
        raise UnreadableError(
            f"it starts with {part.bytes_at(0, 8)!r}, which neither torch.save nor pickle write"
        )
    end = part.start + part.length
    if LEGACY_MAGIC.to_bytes(10, "little") in part.bytes_at(0, 32):
        return Container(part, part.start, end, LEGACY_PICKLES)
    _check_size(part.length)
    return Container(part, part.start, end)


def _zip(part: FileSlice) -> Container:
    try:
        with zipfile.ZipFile(part) as archive:
            records = _records(archive)
            folder = _folder(records)
            # Reading compares the checksum.
            if records.keys() & {f"{folder}/byteorder"} and archive.read(f"{folder}/byteorder") != b"little":
                raise UnreadableError("it was written by a big-endian machine")
            pickled = records[f"{folder}/data.pkl"]
            _check_size(pickled.file_size)
            archive.read(pickled)
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        NotImplementedError,
        EOFError,
        OSError,
        ValueError,
    ) as error:
        raise MalformedError(f"it is a damaged or cut zip archive ({str(error)[:80]})") from None
    prefix = f"{folder}/data/"
    of_storages = {
        name.removeprefix(prefix): info for name, info in records.items() if name.startswith(prefix)
    }
    start = _data_start(part, pickled)
    return Container(part, start, start + pickled.file_size, records=of_storages)


def _records(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    records: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        if not stored or info.flag_bits & 1:
            raise UnreadableError(
                f"its record {info.filename[:60]!r} is compressed or encrypted "
                f"({info.compress_size} bytes for {info.file_size}), which torch.save never does"
            )
        if info.filename in records:
            raise UnreadableError(f"its record {info.filename[:60]!r} is there twice")
        records[info.filename] = info
    return records


def _folder(records: Mapping[str, zipfile.ZipInfo]) -> str:
    found = [name.split("/")[0] for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(found) != 1:
        raise UnreadableError(
            f"it is a zip archive with {len(found)} records 'data.pkl', but torch.save writes one"
        )
    if f"{found[0]}/constants.pkl" in records:
        raise UnreadableError(
            "it is a TorchScript archive; save the state_dict() of what torch.jit.load returns"
        )
    return found[0]


def _check_size(nbytes: int) -> None:
    if nbytes > MAX_PICKLE_BYTES:
        raise UnreadableError(f"its pickle has {nbytes} bytes, more than any checkpoint needs")


def _data_start(part: FileSlice, info: zipfile.ZipInfo) -> int:
    header = part.bytes_at(info.header_offset, _LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise MalformedError(f"its record {info.filename[:60]!r} has no header")
    # Name and extra field may be longer here than in the archive's directory.
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + _LOCAL_HEADER + lengths
    if start + info.file_size > part.length:
        raise MalformedError(f"its record {info.filename[:60]!r} goes beyond the end of the file")
    return part.start + start
