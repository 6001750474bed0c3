"""The process whose forks are the workers of ``--warm-restarts``: it imports torch once, for all rounds of a launch,
with what the first optimizer and ``prepare`` would import.

    python -m lockstep.launch.fork_server LAUNCHER_PID DESCRIPTOR

It reads from the descriptor, a socket, one line of JSON for each worker, with the files for its output, and writes its
process id, and its exit code when it has ended. A fork leaves the loop and runs the script as the interpreter does: its
``__main__``, exit code, traceback and handlers at exit are those of the script.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import runpy
import select
import socket
import sys
import types

import numpy

from lockstep.launch import bare

PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "lockstep.accelerator",
    "lockstep.preparation.prepare",
)
"""What a script would import with the first optimizer, and with ``prepare``."""
MOST_BYTES = 1 << 20
OUTPUTS = 2


def serve(channel: socket.socket) -> list[str]:
    """Fork a worker for each request. Return the arguments of the command, in the worker alone."""
    ends: dict[int, int] = {}
    while True:
        ready = select.select([channel.fileno(), *ends], [], [])[0]
        for end in ends.keys() & ready:
            pid = ends.pop(end)
            os.close(end)
            _, status = os.waitpid(pid, 0)
            _send(channel, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})
        if channel.fileno() in ready:
            data, files, _, _ = socket.recv_fds(channel, MOST_BYTES, OUTPUTS)
            if not data:
                sys.exit()
            while not data.endswith(b"\n"):
                data += channel.recv(MOST_BYTES)
            request = json.loads(data)
            pid = os.fork()
            if not pid:
                channel.close()
                for end in ends:
                    os.close(end)
                _begin(request["environment"], files)
                return list(request["command"])
            for file in files:
                os.close(file)
            ends[os.pidfd_open(pid)] = pid
            _send(channel, {"pid": pid})


def _send(channel: socket.socket, message: dict[str, int]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _begin(environment: dict[str, str], files: list[int]) -> None:
    """Become what a new process would be: a session, variables, outputs, and random numbers of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for standard, file in enumerate(files, 1):
        os.dup2(file, standard)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[union-attr]
    if launch_id := environment.get(bare.ID_VARIABLE):
        bare.leave_watch(LAUNCHER, launch_id)
    bare.die_with_parent(SERVER)
    random.seed()
    numpy.random.seed()


def run(command: list[str]) -> None:
    """Run ``-m MODULE ARGUMENTS`` or ``SCRIPT ARGUMENTS`` in this process."""
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv, path = command, os.path.abspath(command[0])
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    script.__file__ = path
    with io.open_code(path) as file:
        exec(compile(file.read(), path, "exec"), vars(script))


if __name__ == "__main__":
    LAUNCHER, SERVER = int(sys.argv[1]), os.getpid()
    for module in PRELOADED:
        importlib.import_module(module)
    bare.die_with_parent(LAUNCHER)
    run(serve(socket.socket(fileno=int(sys.argv[2]))))
