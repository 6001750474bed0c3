"""The restricted process: a request on standard input, one line of JSON on standard output for each part.

Request: ``{"memory": bytes, "cpu_s": seconds, "parts": [[descriptor, start, length], ...]}``; the descriptors
are open files that it inherited. Answer: ``{"value": ...}``, or ``{"refused": text, "damaged": bool}`` and no more
lines.
"""

from __future__ import annotations

import json
import os
from typing import Any

from .container import FileSlice, load
from .encode import Encoder
from .jail import lock
from .nodes import Damaged, RefusedFile

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


def _write(line: str) -> Any:
    data = memoryview(line.encode("ascii") + b"\n")
    while data:
        data = data[os.write(1, data) :]
