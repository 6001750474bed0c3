"""The flight recorder: which collectives a process has issued, and which of them are complete.

It is read in its JSON form: the other form is a pickle, and asking for it imports torch's compiler into a process that
stands still. Nobody's numbers depend on it, so that what it does not tell is looked for in the Python stack.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from lockstep.torch_internals.versions import expect, probed

DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Relies on: functions (include collectives, only active ones) to JSON text, of gloo and others, and of NCCL."""


def traces() -> Iterator[Mapping[str, object]]:
    """Those of this process, by kind of recorder. What a recorder raises or says wrongly is left out."""
    try:
        from torch._C import _distributed_c10d
    except ImportError:
        return
    for name in DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is None:
            continue
        try:
            trace = json.loads(dump(True, False))
        except Exception:
            continue
        if isinstance(trace, dict):
            yield trace


@probed("flight recorder", "lists collectives")
def probe() -> None:
    """Read the records that there are."""
    found = list(traces())
    expect(bool(found), "a recorder that can be read")
    for trace in found:
        expect(isinstance(trace.get("entries", []), list), "the list of records")
