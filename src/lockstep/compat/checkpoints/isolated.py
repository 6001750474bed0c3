"""Run the restricted process over open files, and judge its answers.

Nothing is unpickled here: what comes back is JSON, of which every place, type and size is checked again.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
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
        stderr=subprocess.STDOUT,
        pass_fds=sorted({descriptor for descriptor, _, _ in parts}),
        env={},
        cwd="/",
        start_new_session=True,
    )
    began, watch = time.monotonic(), threading.Timer(wall_s, process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    watch.start()
    try:
        # A process that has ended says why.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(request.encode("ascii"))
        said = process.stdout.read(MAX_ANSWER_BYTES + 1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S if len(said) <= MAX_ANSWER_BYTES else 0)
    finally:
        watch.cancel()
        process.kill()
        process.stdout.close()
        code = process.wait()
    if time.monotonic() - began >= wall_s:
        raise CheckpointError(
            f"Reading the pickled files took more than {wall_s:.0f} s and was ended. Import a smaller part "
            "of the checkpoint, with skip."
        )
    if len(said) > MAX_ANSWER_BYTES:
        raise CheckpointError(
            f"The pickled files hold more than {MAX_ANSWER_BYTES} bytes of values other than tensors. Leave "
            "files out with skip."
        )
    return _values(said, code, len(parts))


def _values(said: bytes, code: int, count: int) -> list[dict[str, Any]]:
    values, last = [], "nothing"
    # What follows the last line break was cut off.
    for line in said.split(b"\n")[:-1]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict) and entry.keys() == {"values", "storages", "end"}:
            values.append(entry)
        elif isinstance(entry, dict) and "refused" in entry:
            raise RefusedError(len(values), _shortened(str(entry["refused"])), entry.get("damaged") is True)
        else:
            last = _shortened(line.decode("utf-8", "replace"))
    if code == 0 and len(values) == count:
        return values
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise RefusedError(len(values), f"the process that read it ended ({how}; it said: {last})")


def _shortened(text: str) -> str:
    return escape(text[:MAX_MESSAGE])
