"""The restricted process: a request on standard input, one line of JSON on standard output for each part.

Request: ``{"memory": bytes, "cpu_s": seconds, "parts": [[descriptor, start, length], ...]}``; the descriptors
are open files that it inherited. Answer: ``{"value": ...}``, or ``{"refused": text, "damaged": bool}`` and no more
lines.
"""

from __future__ import annotations

import base64
import json
import math
import os

from .container import FileSlice, load
from .jail import lock
from .nodes import Array, Damaged, Items, Mapping, Record, RefusedFile, Tensor, TorchDtype

MAX_DEPTH = 60
_FREE_UNITS = 200_000
_UNITS_PER_BYTE = 16
_EXACT = 2**53


class Encoder:
    """Encodes one file; a value that is used many times counts each time, so that it cannot grow without end."""

    def __init__(self, pickle_bytes: int) -> None:
        self.limit = _FREE_UNITS + _UNITS_PER_BYTE * pickle_bytes
        self.left = self.limit

    def encode(self, value: object, depth: int = 0) -> object:
        """Raises RefusedFile for what is nested too deeply, is too much, or stands for a type only."""
        self._spend(1)
        if depth > MAX_DEPTH:
            raise RefusedFile(f"its values are nested more than {MAX_DEPTH} deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            # Eight bytes of text or data cost as much as one value.
            self._spend(len(value) // 8)
            return value
        if isinstance(value, int):
            return value if abs(value) < _EXACT else {"$": "int", "value": hex(value)}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if isinstance(value, bytes):
            return {"$": "bytes", "value": self._base64(value)}
        if isinstance(value, list):
            return [self.encode(item, depth + 1) for item in value]
        if isinstance(value, Items):
            return {"$": value.kind, "items": [self.encode(item, depth + 1) for item in value.items]}
        if isinstance(value, Mapping):
            pairs = [[self.encode(key, depth + 1), self.encode(item, depth + 1)] for key, item in value.pairs]
            return {"$": "counter" if value.counts else "dict", "items": pairs}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Array) and value.dtype:
            data = self._base64(value.data)
            return {
                "$": "array",
                "dtype": value.dtype,
                "shape": value.shape,
                "data": data,
                "fortran": value.fortran,
            }
        if isinstance(value, TorchDtype):
            return {"$": "dtype", "value": value.dtype}
        if isinstance(value, Record):
            return {"$": "record", "name": value.name, "state": self.encode(value.state, depth + 1)}
        raise RefusedFile(f"it holds a {type(value).__name__} where a plain value is expected")

    def _tensor(self, value: Tensor) -> object:
        storage = value.storage
        place = [storage.start, storage.nbytes, storage.crc32]
        return {"$": "tensor", "dtype": value.dtype, "storage": place, "offset": value.offset, "shape": value.shape,
                "stride": value.stride, "lazy": value.lazy}  # fmt: skip

    def _base64(self, data: bytes) -> str:
        self._spend(len(data) // 8)
        return base64.b64encode(data).decode("ascii")

    def _spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise RefusedFile(f"it holds more than {self.limit} values")


MAX_ANSWER_BYTES = 2**29
DONE = 0
REFUSED = 3


def main() -> None:
    """Never returns."""
    request = json.loads(_everything(0))
    lock(int(request["memory"]), int(request["cpu_s"]))
    answered = 0
    for descriptor, start, length in request["parts"]:
        try:
            line = _answer(FileSlice(descriptor, start, length))
        except RefusedFile as refusal:
            _write(json.dumps({"refused": str(refusal), "damaged": isinstance(refusal, Damaged)}))
            os._exit(REFUSED)
        except MemoryError:
            _write('{"refused": "it needs more memory than a file of its size should"}')
            os._exit(REFUSED)
        answered += len(line)
        if answered > MAX_ANSWER_BYTES:
            _write('{"refused": "its plain values are more than 512 MiB"}')
            os._exit(REFUSED)
        _write(line)
    os._exit(DONE)


def _answer(part: FileSlice) -> str:
    value, pickle_bytes = load(part)
    return json.dumps({"value": Encoder(pickle_bytes).encode(value)}, allow_nan=False)


def _everything(descriptor: int) -> bytes:
    chunks: list[bytes] = []
    while chunk := os.read(descriptor, 2**20):
        chunks.append(chunk)
    return b"".join(chunks)


def _write(line: str) -> None:
    data = memoryview(line.encode("ascii") + b"\n")
    while data:
        data = data[os.write(1, data) :]
