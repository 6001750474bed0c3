"""Where a thread is, told by its Python frames and seen from another thread."""

from __future__ import annotations

import dis
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.process import BaseProcess
from types import CodeType, FrameType

import torch

from lockstep.config.values import join_names
from lockstep.observe.hang.processes import process_state
from lockstep.observe.hang.records import LONGEST_STACK, SourceLine
from lockstep.torch_internals import compile as torch_compile
from lockstep.torch_internals import dataloader
from lockstep.user_call import OURS, WRAPPERS, frames_of, name_of

MOST_FRAMES = 200
TORCH = os.path.dirname(torch.__file__) + os.sep
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
STANDARD_LIBRARY = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
PASSED = {*WRAPPERS, *torch_compile.FRAMES}
# Methods written in C, which have no frame, in which the caller waits for a collective or for the device's queue.
WAITING = {"wait", "synchronize", "item", "tolist", "cpu", "numpy"}
EXPLAINING = {"stopped": "stopped", "zombie": "dead", "gone": "dead"}
"""States of a process for which others wait in vain, and what they are called."""


@dataclass(frozen=True)
class StackSummary:
    """What the frames of a thread tell.

    Attributes:
        place: Innermost line of the user's code.
        text: All frames, innermost last, at most 8 KiB.
        waits: The user's line is inside torch or Lockstep, or waits for a handle or the device.
        call: The function that the user's line called; with its class if it is ours: "Accelerator.save_state".
        operation: The innermost function of torch.distributed that it is in; "": none.
        group: The process group given to that function, if any.
        peer: The rank with which it sends or receives.
    """

    place: SourceLine | None = None
    text: str = ""
    waits: bool = True
    call: str = ""
    operation: str = ""
    group: object = None
    peer: int | None = None


def summarize_stack(thread: int) -> StackSummary:
    """Return what the thread with this identifier does. Never raises."""
    frames = list(islice(frames_of(thread), MOST_FRAMES))
    if not frames:
        return StackSummary()
    at = next((place for place, one in enumerate(frames) if is_users(one.f_code.co_filename)), None)
    # Without a line of the user's, the innermost that is neither torch's nor ours.
    if at is None:
        at = next((i for i, one in enumerate(frames) if not is_engine(one.f_code.co_filename)), 0)
    # What the user's line called, innermost first.
    below = frames[:at]
    engine = [one for one in below if is_engine(one.f_code.co_filename)]
    # A function written in C has no frame; the bytecode before the call has its name.
    called = called_name(frames[at]) if not below else ""
    operation, group, peer = innermost_operation(below)
    if not operation and waits_for_handle(frames[0]):
        operation = "wait"
    names = (name_of(one) for one in reversed(engine) if one.f_code.co_name not in PASSED)
    return StackSummary(
        place=source_line_of(frames[at], loader_wait(below)),
        text=stack_text(frames),
        waits=bool(engine) or called in WAITING,
        call=called or next(filter(None, names), ""),
        operation=operation,
        group=group,
        peer=peer,
    )


def is_engine(file: str) -> bool:
    """Return the file is torch's or ours."""
    return file.startswith((OURS, TORCH))


def is_users(file: str) -> bool:
    """Return the file is neither installed nor part of Python."""
    if is_engine(file) or any(one in file for one in INSTALLED):
        return False
    return not file.startswith(("<frozen", *STANDARD_LIBRARY))


def source_line_of(frame: FrameType, doing: str = "") -> SourceLine:
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name).rsplit("<locals>.", 1)[-1]
    return SourceLine(short_path(frame.f_code.co_filename), frame.f_lineno or 0, name, doing)


def short_path(file: str) -> str:
    """Return the path relative to the working directory, or to where packages are installed, or the file's name."""
    for folder in INSTALLED:
        if folder in file:
            return file.rsplit(folder, 1)[1]
    try:
        inside = os.path.relpath(file)
    except (OSError, ValueError):
        return os.path.basename(file)
    return os.path.basename(file) if inside.startswith("..") else inside


def stack_text(frames: Sequence[FrameType]) -> str:
    """Return one line per frame, innermost last; the outermost are left out where it would be longer than 8 KiB."""
    lines: list[str] = []
    size = 0
    for frame in frames:
        line = f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        size += len(line) + 1
        if size > LONGEST_STACK:
            break
        lines.append(line)
    return "\n".join(reversed(lines))


def called_name(frame: FrameType) -> str:
    """Return the name of the function written in C that the frame is in: the last name read before the call."""
    return last_name_before(frame.f_code, frame.f_lasti)


def last_name_before(code: CodeType, offset: int) -> str:
    name = ""
    for one in dis.get_instructions(code):
        if one.offset >= offset:
            break
        if one.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME"):
            name = str(one.argval)
    return name


def waits_for_handle(frame: FrameType) -> bool:
    """Return the frame, of the user or of torch.distributed, is in some handle's ``wait``: of a send, for instance."""
    file = frame.f_code.co_filename
    ours = is_users(file) or is_engine(file)
    return ours and called_name(frame) == "wait"


def innermost_operation(below: Sequence[FrameType]) -> tuple[str, object, int | None]:
    """Return the function of torch.distributed in progress, the group given to it, and the rank it sends to or receives
    from. Of nested ones the inner: ``all_gather`` for ``all_gather_object``."""
    for frame in below:
        name = frame.f_code.co_name
        file = frame.f_code.co_filename
        if not file.endswith(os.path.join("torch", "distributed", "distributed_c10d.py")) or name[0] in "_<":
            continue
        values = frame.f_locals
        peer = values.get("src" if "recv" in name else "dst") if name.endswith(("send", "recv")) else None
        return name, values.get("group"), peer if isinstance(peer, int) else None
    return "", None, None


def loader_wait(below: Sequence[FrameType]) -> str:
    """Return what there is to say where the thread waits for the worker processes of a data loader; "": it does not."""
    for frame in below:
        if frame.f_code.co_filename.endswith(os.path.join("utils", "data", "dataloader.py")):
            workers = dataloader.workers_of(frame.f_locals.get("self"))
            if workers:
                return "waiting for its data-loader workers (" + describe_workers(workers) + ")"
    return ""


def describe_workers(workers: Sequence[BaseProcess], most: int = 8) -> str:
    """Return "pids 12, 13", and after a pid its state if that is the reason to wait: "pids 12 (stopped), 13 (dead)"."""
    pids = [one.pid for one in workers if one.pid is not None]
    states = {pid: EXPLAINING.get(process_state(pid).word, "") for pid in pids}
    # First those that explain the wait.
    pids.sort(key=lambda pid: not states[pid])
    words = (f"{pid} ({states[pid]})" if states[pid] else str(pid) for pid in pids)
    return f"pid{'s' if len(pids) > 1 else ''} {join_names(words, most)}"
