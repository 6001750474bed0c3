"""``torch.distributed.elastic.multiprocessing``: processes that something else has started."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from subprocess import Popen
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lockstep.torch_internals.versions import expect, probed

OutputFile = IO[str] | IO[bytes] | None
Start = Callable[[int, tuple[str, ...], dict[str, str], OutputFile, OutputFile], Any]
"""(local rank, arguments, environment, files for standard output and error) -> a process with what is used of
``Popen``, or None: start one."""


class _OwnProcessHandler(SubprocessHandler):
    """Relies on: ``_popen`` makes the process at the end of ``__init__``, ``_stdout`` and ``_stderr`` are its files."""

    start: Start

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        process = self.start(self.local_rank_id, args, env, self._stdout, self._stderr)
        return super()._popen(args, env) if process is None else process


class OwnProcesses(SubprocessContext):
    """Processes that ``start`` has at hand; where it has none, torch starts one.

    Relies on: ``_start`` makes a handler of ``entrypoint``, ``args``, ``envs``, ``stdouts``, ``stderrs`` a local rank.
    """

    def __init__(self, start: Start, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._handler = type("Handler", (_OwnProcessHandler,), {"start": staticmethod(start)})

    def _start(self) -> None:
        self.subprocess_handlers = {
            local: self._handler(
                self.entrypoint,
                self.args[local],
                self.envs[local],
                self.stdouts[local],
                self.stderrs[local],
                local,
                None,
            )
            for local in range(self.nprocs)
        }


@probed("torch.distributed.elastic.multiprocessing", "starts its processes")
def probe() -> None:
    """Look at how torch makes a handler, and a handler its process, without starting one."""
    names = list(inspect.signature(SubprocessHandler.__init__).parameters)
    known = ["self", "entrypoint", "args", "env", "stdout", "stderr", "local_rank_id", "numa_options"]
    expect(names == known, "the arguments of a handler")
    used = {"_stdout", "_stderr", "_popen", "local_rank_id"}
    expect(used <= set(SubprocessHandler.__init__.__code__.co_names), "its process and its files")
