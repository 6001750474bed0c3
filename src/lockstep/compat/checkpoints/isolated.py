"""Run the restricted process over open files, and judge its answers.

Nothing is unpickled here: what comes back is JSON, of which every place, type and size is checked again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.words import escape

MEMORY_BYTES = 8 * 2**30
CPU_S = 600
WALL_S = 1200
# Seconds between its last word and its end.
END_S = 10
MAX_ANSWER_BYTES = 2**29 + 2**20
MAX_MESSAGE = 400
# The package ``restricted`` is imported by itself: the rest of lockstep, torch and site-packages stay outside.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from restricted.main import main; del sys.path[0]; main()"
)


class RefusedError(Exception):
    """The restricted process refused the file of this number; the text says why.

    ``damaged``: because it is not whole, rather than for what it holds.
    """

    def __init__(self, number: int, reason: str, damaged: bool = False) -> None:
        super().__init__(reason)
        self.number = number
        self.reason = reason
        self.damaged = damaged


def unpickle(
    parts: Sequence[tuple[int, int, int]], memory_bytes: int = MEMORY_BYTES, wall_s: float = WALL_S
) -> list[dict[str, Any]]:
    """Return the JSON of each part ``(descriptor, start, number of pickles)``, by one restricted process.

    Raises:
        RefusedError: a part is not what torch or pickle write, or names something that is not allowed.
        CheckpointError: the process was ended because it did something else than read.
    """
    request = json.dumps({"memory": memory_bytes, "cpu_s": CPU_S, "parts": list(parts)})
    # Nothing of ours reaches it: no site-packages, no variables, no folder, no terminal.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", _CODE, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=sorted({descriptor for descriptor, _, _ in parts}),
        env={},
        cwd="/",
        start_new_session=True,
    )
    try:
        answer, error = _converse(process, request.encode("ascii"), wall_s)
    finally:
        process.kill()
        code = process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return _values(answer, error, code, len(parts))


def _converse(process: subprocess.Popen[bytes], request: bytes, wall_s: float) -> tuple[bytes, bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    # The process has ended; its standard error says why.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(request)
        process.stdin.close()
    deadline = time.monotonic() + wall_s
    received: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): []}
    output, error = received
    is_open, total = {output, error}, 0
    while is_open:
        ready, _, _ = select.select(list(is_open), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise CheckpointError(
                f"Reading the pickled files took more than {wall_s:.0f} s and was ended. Import a smaller part "
                "of the checkpoint, with skip."
            )
        for descriptor in ready:
            chunk = os.read(descriptor, 2**20)
            received[descriptor].append(chunk)
            total += len(chunk)
            if not chunk:
                is_open.remove(descriptor)
        if total > MAX_ANSWER_BYTES:
            raise CheckpointError(
                f"The pickled files hold more than {MAX_ANSWER_BYTES} bytes of values other than tensors. Leave "
                "files out with skip."
            )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    return b"".join(received[output]), b"".join(received[error])


def _values(answer: bytes, error: bytes, code: int, count: int) -> list[dict[str, Any]]:
    # What follows the last line break was cut off.
    lines = answer.split(b"\n")[:-1]
    try:
        answers = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        answers = []
    values = [
        entry
        for entry in answers
        if isinstance(entry, dict) and entry.keys() == {"values", "storages", "end"}
    ]
    if code == 0 and len(values) == count:
        return values
    if answers and isinstance(answers[-1], dict) and "refused" in answers[-1]:
        damaged = answers[-1].get("damaged") is True
        raise RefusedError(len(answers) - 1, _shortened(str(answers[-1]["refused"])), damaged)
    output = _shortened(
        error.decode("utf-8", "replace").strip().splitlines()[-1] if error.strip() else "nothing"
    )
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise RefusedError(len(values), f"the process that read it ended ({how}; it said: {output})")


def _shortened(text: str) -> str:
    return escape(text[:MAX_MESSAGE])
