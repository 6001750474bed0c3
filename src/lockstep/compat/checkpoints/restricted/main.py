"""The restricted process: a request on standard input, one line of JSON on standard output for each part.

Request: ``{"memory": bytes, "cpu_s": seconds, "parts": [[descriptor, start, pickles], ...]}``; the descriptors are
open files that it inherited, and from ``start`` on so many pickles follow each other. Answer:
``{"values": [...], "storages": [...], "end": position}``, or ``{"refused": text, "damaged": bool}`` and no more lines.
"""

from __future__ import annotations

import base64
import json
import math
import os

from .jail import lock
from .machine import Damaged, Machine, PickledNode, RefusedFile

MAX_DEPTH = 100
_FREE_UNITS = 200_000
_UNITS_PER_BYTE = 16
_EXACT = 2**53


class Encoder:
    """Encodes one file; a value that is used many times counts each time, so that it cannot grow without end."""

    def __init__(self, pickle_bytes: int) -> None:
        self.limit = _FREE_UNITS + _UNITS_PER_BYTE * pickle_bytes
        self.left = self.limit

    def encode(self, value: object, depth: int = 0) -> object:
        """Return ``value`` as JSON has it. Raises RefusedFile for what is nested too deeply, or is too much."""
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
            self._spend(len(value) // 8)
            return {"$": "bytes", "value": base64.b64encode(value).decode("ascii")}
        if isinstance(value, list):
            return [self.encode(item, depth + 1) for item in value]
        if not isinstance(value, PickledNode):
            raise RefusedFile(f"it holds a {type(value).__name__}")
        found: dict[str, object] = {
            "$": value.kind,
            "items": [self.encode(item, depth + 1) for item in value.items],
        }
        if value.pairs:
            found["pairs"] = [[self.encode(item, depth + 1) for item in pair] for pair in value.pairs]
        if value.has_state:
            found["state"] = self.encode(value.state, depth + 1)
        return found

    def _spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise RefusedFile(f"it holds more than {self.limit} values")


MAX_ANSWER_BYTES = 2**29
DONE = 0
REFUSED = 3


def main() -> None:
    """Answer the request. Never returns."""
    request = json.loads(_everything(0))
    # Opened now, as nothing can be opened later.
    files = {part[0]: open(part[0], "rb", closefd=False) for part in request["parts"]}  # noqa: SIM115
    lock(int(request["memory"]), int(request["cpu_s"]))
    answered = 0
    for descriptor, start, pickles in request["parts"]:
        try:
            line = _answer(Machine(files[descriptor]), start, pickles)
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


def _answer(machine: Machine, start: int, pickles: int) -> str:
    machine.file.seek(start)
    values = [machine.run() for _ in range(pickles)]
    end = machine.file.tell()
    encoder = Encoder(end - start)
    values, storages = ([encoder.encode(item) for item in items] for items in (values, machine.storages))
    return json.dumps({"values": values, "storages": storages, "end": end}, allow_nan=False)


def _everything(descriptor: int) -> bytes:
    chunks: list[bytes] = []
    while chunk := os.read(descriptor, 2**20):
        chunks.append(chunk)
    return b"".join(chunks)


def _write(line: str) -> None:
    data = memoryview(line.encode("ascii") + b"\n")
    while data:
        data = data[os.write(1, data) :]
