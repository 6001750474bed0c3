"""Files of ``torch.save``: where their pickle and the bytes of their storages are.

The zip form is one archive of stored, never compressed records; the older form is a row of pickles with the
storages behind them. Anything else that starts like a pickle is one plain pickle.
"""

from __future__ import annotations

import encodings.cp437  # noqa: F401  (names of zip records may be in it, and nothing can be imported later)
import io
import os
import zipfile
from collections.abc import Callable
from typing import Any

from .machine import Machine
from .nodes import Damaged, Items, Mapping, RefusedFile, Storage, Symbol
from .symbols import ITEM_BYTES

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_BYTES = LEGACY_MAGIC.to_bytes(10, "little")
LEGACY_PROTOCOL = 1001
# Bytes of it, without name and extra field.
_LOCAL_HEADER = 30
MAX_PICKLE_BYTES = 2**31
BUFFER_BYTES = 2**20


class FileSlice(io.RawIOBase):
    """``length`` bytes of an open file from ``start``, as a file of its own; opens nothing."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self.descriptor = descriptor
        self.start = start
        self.length = length
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the start")
        self.at = base + offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self.length - self.at))
        data = os.pread(self.descriptor, wanted, self.start + self.at)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def bytes_at(self, start: int, length: int) -> bytes:
        self.seek(start)
        buffer = bytearray(min(length, max(0, self.length - start)))
        view, filled = memoryview(buffer), 0
        while filled < len(buffer) and (count := self.readinto(view[filled:])):
            filled += count
        return bytes(view[:filled])


def load(part: FileSlice) -> tuple[object, int]:
    """The value of the file, and how many bytes of pickle it came from. Raises RefusedFile."""
    start = part.bytes_at(0, 2)
    if start == b"PK":
        return _load_zip(part)
    if not start:
        raise Damaged("it is empty")
    if part.bytes_at(257, 5) == b"ustar":
        raise RefusedFile("it is a tar file of torch before 0.4; load and save it again with that torch")
    if start[:1] != b"\x80":
        raise RefusedFile(
            f"it starts with {part.bytes_at(0, 8)!r}, which neither torch.save nor pickle write"
        )
    if _MAGIC_BYTES in part.bytes_at(0, 32):
        return _load_legacy(part)
    return load_plain(part)


def load_plain(part: FileSlice) -> tuple[object, int]:
    """The value of a file that is one pickle without tensors."""
    if part.length > MAX_PICKLE_BYTES:
        raise RefusedFile(f"its pickle has {part.length} bytes, more than any checkpoint needs")
    data = io.BytesIO(part.bytes_at(0, part.length))
    value = Machine(data, _no_storages).run()
    if data.tell() != part.length:
        raise Damaged(f"{part.length - data.tell()} bytes follow its pickle")
    return value, part.length


def _no_storages(identifier: object) -> object:
    raise RefusedFile("it refers to a storage, but has none")


# -------------------------------------------------------------------------------------------------- zip


def _load_zip(part: FileSlice) -> tuple[object, int]:
    try:
        with zipfile.ZipFile(part) as archive:
            records = _records(archive)
            prefix = _prefix(records)
            order = _read(archive, records, f"{prefix}/byteorder")
            if order not in (None, b"little"):
                raise RefusedFile("it was written by a big-endian machine")
            data = _read(archive, records, f"{prefix}/data.pkl")
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        NotImplementedError,
        EOFError,
        OSError,
        ValueError,
    ) as error:
        raise Damaged(f"it is a damaged or cut zip archive ({str(error)[:80]})") from None
    assert data is not None
    storages: dict[str, Storage] = {}

    def storage(identifier: object) -> Storage:
        dtype, key, count = _storage_id(identifier)
        if key not in storages:
            info = records.get(f"{prefix}/data/{key}")
            nbytes = count * ITEM_BYTES[dtype]
            if info is None or info.file_size < nbytes:
                available = "no" if info is None else str(info.file_size)
                raise Damaged(
                    f"storage {key[:40]!r} should have {nbytes} bytes, but the archive has {available}"
                )
            # The checksum is of the whole record, and says nothing of a part.
            whole = info.file_size == nbytes
            start = _data_start(part, info)
            storages[key] = Storage(dtype, nbytes, key, start, info.CRC if whole else None)
        return _same(storages[key], dtype)

    return Machine(io.BytesIO(data), storage).run(), len(data)


def _records(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    records: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.compress_size != info.file_size
            or info.flag_bits & 1
        ):
            raise RefusedFile(
                f"its record {info.filename[:60]!r} is compressed or encrypted "
                f"({info.compress_size} bytes for {info.file_size}), which torch.save never does"
            )
        if info.filename in records:
            raise RefusedFile(f"its record {info.filename[:60]!r} is there twice")
        records[info.filename] = info
    return records


def _prefix(records: dict[str, zipfile.ZipInfo]) -> str:
    found = [name.split("/")[0] for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(found) != 1:
        raise RefusedFile(
            f"it is a zip archive with {len(found)} records 'data.pkl', but torch.save writes one"
        )
    if f"{found[0]}/constants.pkl" in records:
        raise RefusedFile("it is a TorchScript archive; save the state_dict() of what torch.jit.load returns")
    return found[0]


def _read(archive: zipfile.ZipFile, records: dict[str, zipfile.ZipInfo], name: str) -> bytes | None:
    if name not in records:
        return None
    if records[name].file_size > MAX_PICKLE_BYTES:
        raise RefusedFile(f"its pickle has {records[name].file_size} bytes, more than any checkpoint needs")
    # This checks the crc32.
    return archive.read(records[name])


def _data_start(part: FileSlice, info: zipfile.ZipInfo) -> int:
    header = part.bytes_at(info.header_offset, _LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise Damaged(f"its record {info.filename[:60]!r} has no header")
    # Name and extra field may be longer here than in the archive's directory.
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + _LOCAL_HEADER + lengths
    if start + info.file_size > part.length:
        raise Damaged(f"its record {info.filename[:60]!r} goes beyond the end of the file")
    return part.start + start


# ----------------------------------------------------------------------------------------------- legacy


def _load_legacy(part: FileSlice) -> tuple[object, int]:
    part.seek(0)
    data = io.BufferedReader(part, BUFFER_BYTES)

    def following(persistent_load: Callable[[object], object] = _no_storages) -> object:
        return Machine(data, persistent_load).run()

    if following() != LEGACY_MAGIC or following() != LEGACY_PROTOCOL:
        raise RefusedFile("it has an unknown version of the form of torch before 1.6")
    system = following()
    if isinstance(system, Mapping) and ("little_endian", False) in system.pairs:
        raise RefusedFile("it was written by a big-endian machine")
    storages: dict[str, Storage] = {}

    def storage(identifier: object) -> Storage:
        dtype, key, count = _storage_id(identifier)
        new = Storage(dtype, count * ITEM_BYTES[dtype], key)
        return _same(storages.setdefault(key, new), dtype)

    value = following(storage)
    keys = following()
    pickled = position = data.tell()
    if not isinstance(keys, list) or any(not isinstance(key, str) or key not in storages for key in keys):
        raise Damaged("its list of storages is not the one that its tensors use")
    for key in keys:
        stored = storages[key]
        # The number of elements in 8 bytes, then the elements.
        count = int.from_bytes(part.bytes_at(position, 8), "little")
        position += 8
        if count * ITEM_BYTES[stored.dtype] != stored.nbytes or position + stored.nbytes > part.length:
            raise Damaged(f"storage {key[:40]!r} should have {stored.nbytes} bytes, but the file has others")
        stored.start = part.start + position
        position += stored.nbytes
    if any(stored.start < 0 for stored in storages.values()):
        raise Damaged("a storage that its tensors use is missing")
    return value, pickled


# ---------------------------------------------------------------------------------------------- storages


def _storage_id(identifier: object) -> tuple[str, str, int]:
    """dtype, key and number of elements of ``("storage", type, key, device, count)``."""
    fields = identifier.items if isinstance(identifier, Items) and identifier.kind == "tuple" else []
    if len(fields) not in (5, 6) or fields[0] != "storage" or not isinstance(fields[1], Symbol):
        raise RefusedFile("it refers to something other than a storage")
    kind, key, count = fields[1].about, fields[2], fields[4]
    if len(fields) == 6 and fields[5] is not None:
        raise RefusedFile("it has views of storages as torch before 0.4 wrote them")
    if kind not in ITEM_BYTES or not isinstance(key, str) or type(count) is not int or not 0 <= count < 2**56:
        raise RefusedFile("it refers to a storage of an unknown type, name or size")
    return kind, key, count


def _same(storage: Storage, dtype: str) -> Storage:
    if storage.dtype != dtype:
        raise RefusedFile(f"storage {storage.key[:40]!r} is used as {storage.dtype} and as {dtype}")
    return storage
