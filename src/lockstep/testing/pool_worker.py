"""The worker's side of the pool: waits for tasks, runs each in a fresh environment, reports.

A message either way is pickled bytes: the queue of ``torch.multiprocessing`` would put tensors
into shared memory, whose life then depends on the sender's.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from lockstep.config.sources import export_environment, inherited_environment, restore_environment

Module = tuple[str, "str | None"]
"""Its name, and its file."""
LEFT_GROUPS: deque[object] = deque(maxlen=3)


@dataclass(frozen=True)
class Task:
    """One call on one rank. ``call`` is the pickled (fn, args, kwargs); ``modules`` define what it refers to."""

    call: bytes
    modules: tuple[Module, ...]
    path: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Report:
    """What became of a task: the pickled result, or the traceback of what was raised."""

    result: bytes | None
    traceback: str | None
    time: float


def serve(connection: Connection, log_path: str, stacks_path: str) -> None:
    """Run tasks until the parent closes its end."""
    # The pool kills this process together with its children.
    os.setpgid(0, 0)
    threading.Thread(target=die_with_parent, name="die_with_parent", daemon=True).start()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = open(stacks_path, "w")  # noqa: SIM115 - lives as long as the process
    # The handler is written in C: it also answers when the main thread is inside a collective.
    faulthandler.register(signal.SIGQUIT, file=stacks, all_threads=True)
    # Loaders fork, as in a script.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    from lockstep.runtime import process

    torch.set_num_threads(1)
    process.THREADS_LET_GO_S = 0.0
    gc.freeze()
    while True:
        try:
            task: Task = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        restore = snapshot()
        report = run(task)
        if report.traceback is not None:
            # First the cause, then the clean-up.
            connection.send_bytes(pickle.dumps(report))
        try:
            restore()
        except BaseException:
            if report.traceback is None:
                text = "while cleaning up after the test:\n" + traceback.format_exc()
                report = Report(None, text, time.time())
                connection.send_bytes(pickle.dumps(report))
            # A process that could not be cleaned is not used again.
            os._exit(1)
        if report.traceback is None:
            connection.send_bytes(pickle.dumps(report))


def die_with_parent() -> None:
    """End with the parent. Collectives release the interpreter lock, so this runs even while the main thread hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def run(task: Task) -> Report:
    """Run one task in its environment; every exception, SystemExit too, becomes a report."""
    export_environment(task.environment)
    sys.path[:] = task.path
    try:
        for module in task.modules:
            import_module(*module)
        fn, args, kwargs = pickle.loads(task.call)
        seed_all(0)
        return Report(pickle.dumps(fn(*args, **kwargs)), None, time.time())
    except BaseException as error:
        failed_at = time.time()
        return Report(None, describe(error), failed_at)


def import_module(name: str, file: str | None) -> None:
    """Make a test's module importable under the name that pytest gave it."""
    if name in sys.modules:
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if file is None or not f"{name}.".startswith(f"{error.name}."):
            # What is missing is imported by the module itself.
            raise
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def describe(error: BaseException) -> str:
    """Return the traceback, below it the innermost frame's variables when an assertion failed."""
    # Without the frame of `run`.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    if isinstance(error, AssertionError) and frames is not None:
        while frames.tb_next is not None:
            frames = frames.tb_next
        text += "with\n" + "".join(
            f"    {name} = {shorten(value)}\n" for name, value in frames.tb_frame.f_locals.items()
        )
    return text


def shorten(value: object, limit: int = 400) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr failed: {error}>"
    return text if len(text) <= limit else text[:limit] + "..."


def seed_all(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def snapshot() -> Callable[[], None]:
    """Remember the process's settings; the returned function ends the process group and restores them."""
    import torch

    environment = inherited_environment()
    directory, path, argv = os.getcwd(), list(sys.path), list(sys.argv)
    excepthook = sys.excepthook
    dtype = torch.get_default_dtype()

    def restore() -> None:
        end_process_group()
        accelerator = sys.modules.get("lockstep.accelerator")
        # If it is not imported, no function needed one.
        if accelerator is not None:
            accelerator.Accelerator.forget_all()
        restore_environment(environment)
        os.chdir(directory)
        sys.path[:], sys.argv[:] = path, argv
        sys.excepthook = excepthook
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        # The setter imports the compiler, which takes a second.
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)
        gc.collect()
        # What outlives a test are imports and caches: not to be visited after every one.
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()

    return restore


def end_process_group() -> None:
    """End it without waiting until gloo's threads have let go of it: it is held until two tests later."""
    import torch.distributed as dist

    from lockstep.runtime import process

    LEFT_GROUPS.append(dist.group.WORLD if dist.is_initialized() else None)
    process.end_runtime()
    if dist.is_initialized():
        process.leave_process_group()
