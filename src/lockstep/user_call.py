"""Which call of the user's script a thread is in, told by its frames, and a sentence for ranks in different ones.

Knows nothing of torch, so that everything that compares ranks may use it.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

OURS = str(Path(__file__).parent) + os.sep
# Files in which the user's own code is not: installed packages (torch among them), Python, this package.
ENGINES = (
    *{sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    OURS,
    "<frozen",
)
WRAPPERS = ("wrapper", "decorate_context", "inner", "__call__", "_fn", "__exit__")
# How the names of functions end that call a module's forward.
MODULE_CALL = "call_impl"
# Methods in which every rank has to take part, so that one rank alone in them holds up all.
EVERY_RANK = {
    f"Accelerator.{name}"
    for name in (
        "broadcast",
        "broadcast_object_list",
        "clip_grad_norm_",
        "gather",
        "gather_for_loss",
        "gather_for_metrics",
        "gather_object",
        "get_state_dict",
        "load_state",
        "pad_across_processes",
        "reduce",
        "save_model",
        "save_state",
        "wait_for_everyone",
    )
}
ON_ONE_RANK = ("is_main_process", "is_local_main_process")
# What each process has a part of, unless the whole model is on each.
OF_ALL_RANKS = ("save_state", "save_model")


class UserCall(NamedTuple):
    """``name``: what the user's line called, "" if nobody knows; ``line``: "train.py:63"."""

    name: str = ""
    line: str = ""

    def __str__(self) -> str:
        return f"{self.name or 'a collective'}{f' ({self.line})' if self.line else ''}"


def user_call(thread: int | None = None) -> UserCall:
    """Return what a thread's innermost line of the user's has called: that of this thread, else of the main one."""
    for one in (thread or threading.get_ident(), threading.main_thread().ident):
        found = call_in((frame, frame.f_lineno) for frame in reversed(list(frames_of(one))))
        if found.line:
            return found
    return UserCall()


def frames_of(thread: int | None) -> Iterator[FrameType]:
    """Return the frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_in(frames: Iterable[tuple[FrameType, int]]) -> UserCall:
    """Return what the innermost line outside of installed packages called.

    Args:
        frames: Outermost first, with the line in each.
    """
    call, line, is_users = "", "", False
    for frame, number in frames:
        code = frame.f_code
        if not code.co_filename.startswith(ENGINES):
            is_users, call, line = True, "", f"{os.path.basename(code.co_filename)}:{number}"
        elif is_users and code.co_name not in WRAPPERS:
            is_users, call = False, name_of(frame)
    return UserCall(call, line)


def name_of(frame: FrameType) -> str:
    """Return the function's name, with its class if it is ours: "Accelerator.save_state"."""
    if frame.f_code.co_name.endswith(MODULE_CALL):
        return "forward"
    owner = frame.f_locals.get("self") if frame.f_code.co_filename.startswith(OURS) else None
    if owner is None:
        return frame.f_code.co_name
    classes = [kind.__name__ for kind in type(owner).__mro__]
    # A class of the user's that inherits from it is still that.
    kind = "Accelerator" if "Accelerator" in classes else classes[0]
    return f"{kind}.{frame.f_code.co_name}"


def in_different_calls(calls: Mapping[int, UserCall]) -> str:
    """Return a sentence of what each rank has called, and one of advice; "" where all are in the same call."""
    if len(set(calls.values())) < 2:
        return ""
    by_call: dict[UserCall, list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_call.setdefault(call, []).append(rank)
    places = ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} called {call}"
        for call, ranks in by_call.items()
    )
    names = {call.name for call in by_call}
    alone = [call for call in by_call if call.name in EVERY_RANK and len(names) > 1]
    advice = "Make every rank make the same calls, in the same order."
    if alone:
        advice = f"Call {alone[0].name} on every rank ({alone[0].line}), or on none."
    return f"{places[0].upper()}{places[1:]}. {advice}"


def one_rank_line() -> str:
    """Return the line at which the script lets one rank alone make a call, such as "train.py:63"; "": nowhere."""
    for frame in frames_of(threading.get_ident()):
        file = frame.f_code.co_filename
        if not file.startswith(OURS) and frame.f_lineno in lines_of_one_rank(file):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
    return ""


@functools.cache
def lines_of_one_rank(file: str) -> frozenset[int]:
    """Return the lines of a script that stand under ``if accelerator.is_main_process``, or under that and more."""
    chosen = (
        node.body for node in nodes_of(file) if isinstance(node, ast.If) and chooses_one_rank(node.test)
    )
    return frozenset(
        line
        for body in chosen
        for one in body
        for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)
    )


def call_on_one_rank(file: str, names: Iterable[str]) -> UserCall:
    """Return the first of these methods that a script calls under such an ``if``, and nowhere else; or an empty one."""
    lines = lines_of_one_rank(file)
    found: dict[str, list[int]] = {}
    for node in nodes_of(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            found.setdefault(node.func.attr, []).append(node.lineno)
    for name, places in found.items():
        if lines.issuperset(places):
            return UserCall(f"Accelerator.{name}", f"{os.path.basename(file)}:{min(places)}")
    return UserCall()


def nodes_of(file: str) -> Iterator[ast.AST]:
    """Return all nodes of a source file; none of what cannot be read."""
    try:
        return ast.walk(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError, RecursionError):
        return iter(())


def chooses_one_rank(test: ast.expr) -> bool:
    """Return whether a condition holds on one rank of a machine at most."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(chooses_one_rank(one) for one in test.values)
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
        return isinstance(test.left, ast.Attribute) and test.left.attr in ("process_index", "rank")
    return isinstance(test, ast.Attribute) and test.attr in ON_ONE_RANK
