"""Values of a pickle as JSON: plain ones as they are, all others as ``{"$": kind, ...}``."""

from __future__ import annotations

import base64
import math

from .nodes import Array, Items, Mapping, Record, RefusedFile, Tensor, Word

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
        if isinstance(value, Word):
            return {"$": "dtype", "value": value.dtype}
        if isinstance(value, Record):
            return {"$": "record", "name": value.name, "state": self.encode(value.state, depth + 1)}
        raise RefusedFile(f"it holds a {type(value).__name__} where a plain value is expected")

    def _tensor(self, value: Tensor) -> object:
        storage = value.storage
        place = [storage.start, storage.nbytes, storage.crc32]
        return {"$": "tensor", "dtype": value.dtype, "storage": place, "offset": value.offset, "shape": value.shape,
                "stride": value.stride}  # fmt: skip

    def _base64(self, data: bytes) -> str:
        self._spend(len(data) // 8)
        return base64.b64encode(data).decode("ascii")

    def _spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise RefusedFile(f"it holds more than {self.limit} values")
