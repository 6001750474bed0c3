"""Runs of a check in forks of one process that has torch in memory: the command's own, without their start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.verify import CouldNotRun, ParityCheck, ProcessFacts, Request, RunArtifacts, RunSpec, ScriptRun

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "lockstep.accelerator",
    "lockstep.observe.hang.process",
    "lockstep.preparation.prepare",
    "lockstep.verify.collect.worker",
)
# Ranks are forked when a line comes, and ended when the next one does, if they hang.
PROGRAM = """
import importlib, json, os, signal, sys, time, traceback

for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
main = importlib.import_module(sys.argv[2]).main

for line in sys.stdin:
    task = json.loads(line)
    ranks, codes = {}, []
    for rank, variables in enumerate(task["ranks"]):
        child = os.fork()
        if not child:
            break
        ranks[child] = rank
    else:
        while ranks:
            child, status = os.wait()
            del ranks[child]
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1]:
                time.sleep(0.3)  # they may fail alike
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
        print(max(codes, key=abs), flush=True)
        continue
    signal.alarm(task["limit_s"])
    os.environ.update(variables)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    code = 0
    try:
        main([task["spec"], *task["program"]])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


class ForkServer:
    """A process with torch in memory, of which forks run a ``worker``; ``preload``: further modules."""

    def __init__(self, preload: Sequence[str] = (), worker: str = "lockstep.verify.collect.worker") -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps([*PRELOADED, *preload]), worker],
            env={
                **inherited,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "LOCKSTEP_CONFIG_FILE": "",
                "HF_HUB_OFFLINE": "1",
                "RES_OPTIONS": "timeout:1 attempts:1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, spec: Path, program: Sequence[str], ranks: int, log: Path, limit_s: int) -> int:
        """The exit code of ``program`` on so many ranks; 0: a process alone, which is told no rank."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        group = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        group |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        variables = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
        task = {"spec": str(spec), "program": list(program), "ranks": variables, "log": str(log)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({**task, "limit_s": limit_s}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline() or 1)

    def close(self) -> None:
        """End it."""
        self._process.communicate()


class ForkedRun:
    """A run like ``ScriptRun``, which is made when it is waited for."""

    def __init__(self, server: ForkServer, spec: RunSpec, program: Sequence[str], limit_s: int) -> None:
        self._server, self._spec, self._program, self._limit_s = server, spec, program, limit_s
        self._folder = Path(spec.folder)
        self._folder.mkdir(parents=True)

    def wait(self) -> RunArtifacts:
        """What it has left; raises CouldNotRun."""
        spec, log = self._spec, self._folder / "output.txt"
        ranks = spec.ranks
        if spec.is_alone:
            ranks = 1 if spec.wrapped else 0  # scripts with torch's own DDP need a process group there too
        code = self._server.run(
            spec.write(self._folder / "spec.json"), self._program, ranks, log, self._limit_s
        )
        facts = ProcessFacts.read_all(self._folder)
        if code or not facts:
            error = CouldNotRun(
                f"{spec.role.value} failed ({code}):\n{log.read_text('utf-8', 'replace')[-6000:]}"
            )
            error.left = RunArtifacts(self._folder, tuple(facts)) if facts else None
            raise error
        return RunArtifacts(self._folder, tuple(facts))

    def end(self) -> None:
        """It has ended."""


class ForkedCheck(ParityCheck):
    """A check whose runs are such forks."""

    def __init__(self, request: Request, server: ForkServer) -> None:
        super().__init__(request)
        self._server = server

    def _start(self, spec: RunSpec) -> ScriptRun:
        request = self._request
        run = ForkedRun(self._server, spec, request.program.words, int(request.timeout_s))
        return run  # type: ignore[return-value]
