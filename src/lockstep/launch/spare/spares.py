"""The launcher's side: one spare process a rank, started once the round has made its first step, used by the next."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

from lockstep.config.sources import IMPORTS_VARIABLE
from lockstep.launch.bare import SPARE_VARIABLE as VARIABLE
from lockstep.launch.spare import site
from lockstep.torch_internals import elastic
from lockstep.torch_internals.elastic import OutputFile, OwnProcesses

SITE = os.path.dirname(os.path.abspath(site.__file__ or ""))
ANSWER_S = 2.0
PROBE_S = 30.0
PROBE, PROBED = "probe", 71
MOST_BYTES = 1 << 16


def is_possible(command: tuple[str, ...]) -> bool:
    """Whether there can be spare processes for a command here: on Linux, for a script that Python runs."""
    return (
        sys.platform == "linux"
        and command[0] == sys.executable
        and "lockstep.compat.accelerate" not in command[1:3]
    )


class SpareProcess:
    """One of them, as the launcher sees it.

    ``state``: "" while it imports, ``ready``, or ``unfit``, after which it ends; once it is wanted ``taken``, then
    ``warm`` or ``cold``. ``why`` explains ``unfit`` and ``cold``.
    """

    def __init__(
        self, arguments: tuple[str, ...], environment: Mapping[str, str], stdout: OutputFile
    ) -> None:
        ours, theirs = socket.socketpair()
        self.token = uuid.uuid4().hex
        self.state = self.why = ""
        self._received = b""
        self._channel = ours
        before = environment.get("PYTHONPATH")
        added = {
            "PYTHONPATH": f"{SITE}{os.pathsep}{before}" if before else SITE,
            VARIABLE: f"{self.token}:{theirs.fileno()}",
        }
        with theirs:
            self.process = subprocess.Popen(
                arguments,
                env={**environment, **added},
                stdout=stdout,
                stderr=stdout,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def receive(self, limit_s: float = 0.0) -> None:
        """Take in what it has said; waits for it to say something."""
        while self._channel.fileno() >= 0 and select.select([self._channel], [], [], limit_s)[0]:
            limit_s = 0.0
            try:
                data = self._channel.recv(MOST_BYTES)
            except OSError:
                data = b""
            if not data:
                self._channel.close()
                return
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.state = str(message["state"])
                self.why = str(message.get("why", ""))

    def receive_answer(self) -> None:
        """Until it says something after it was told to begin; it may be importing what was new a moment ago."""
        deadline = time.monotonic() + ANSWER_S
        while self.state in ("ready", "") and self._channel.fileno() >= 0 and time.monotonic() < deadline:
            self.receive(max(0.0, deadline - time.monotonic()))

    def send(self, message: Mapping[str, object], files: tuple[int, ...] = ()) -> bool:
        """Whether it could be told."""
        data = json.dumps(message).encode() + b"\n"
        try:
            self._channel.settimeout(ANSWER_S)
            sent = socket.send_fds(self._channel, [data], list(files))
            self._channel.sendall(data[sent:])
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Listen to it no more."""
        self._channel.close()

    def end(self) -> None:
        """Kill it, whatever it does."""
        self.close()
        self.process.kill()
        self.process.wait()


class Spares:
    """The spare processes of this launcher.

    Args:
        work_dir: Where workers write down what they have imported.
        log_dir: Where their output will go, if not to the console.
        say: Prints one sentence for people.
    """

    def __init__(self, work_dir: str, log_dir: str | None, say: Callable[[str], None]) -> None:
        self._work_dir, self._log_dir, self._say = work_dir, log_dir, say
        self._spares: dict[int, SpareProcess] = {}
        self._taken: list[SpareProcess] = []
        self._wanted: dict[int, tuple[tuple[str, ...], dict[str, str]]] = {}
        self._records: dict[int, int] = {}
        self._reported: set[str] = set()
        self._works: bool | None = None

    @property
    def tokens(self) -> frozenset[str]:
        """What marks the processes that are to outlive a round."""
        return frozenset(spare.token for spare in self._spares.values())

    def processes(self, **keywords: object) -> OwnProcesses:
        """As torch's ``start_processes``, of those that wait and of new ones."""
        elastic.probe()
        self._round_begins()
        processes = OwnProcesses(self.take, **keywords)
        try:
            processes.start()
        except BaseException:
            processes.close()
            raise
        return processes

    def variables(self, local: int) -> dict[str, str]:
        """What a worker with this local rank gets."""
        return {IMPORTS_VARIABLE: self._record(local)}

    def _record(self, local: int) -> str:
        return os.path.join(self._work_dir, f"imports-{local}.json")

    # -- while a round runs --------------------------------------------------------------------------

    def _round_begins(self) -> None:
        """What the processes of the last round have written down says nothing of this one's."""
        self._wanted, self._records = {}, {}
        with suppress(OSError):
            for path in Path(self._work_dir).glob("imports-*.json"):
                path.unlink()

    def keep_up(self) -> None:
        """Start those whose rank has made its first step, tell others of new modules, and hear what they say."""
        for taken in self._taken[:]:
            taken.receive()
            if taken.state != "taken" or taken.process.poll() is not None:
                self._taken.remove(taken)
                taken.close()
                if taken.why:
                    self._cold(taken.why)
        for local, (arguments, environment) in self._wanted.items():
            spare = self._spares.get(local)
            if spare is not None:
                spare.receive()
            try:
                written = os.stat(self._record(local)).st_mtime_ns
            except OSError:
                # No step so far.
                continue
            if written == self._records.get(local):
                continue
            self._records[local] = written
            if spare is not None:
                spare.send({})
            elif self._can_start(environment):
                self._start(local, arguments, environment)

    def _start(self, local: int, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        try:
            # Its standard output has to be of the kind that it will be: Python looks when it starts.
            with tempfile.TemporaryFile(dir=self._log_dir) if self._log_dir else nullcontext() as place:
                self._spares[local] = SpareProcess(arguments, environment, place)
        except OSError as error:
            self._cold(f"a spare process cannot be started: {error.strerror}")

    def _can_start(self, environment: Mapping[str, str]) -> bool:
        """Whether an interpreter with this environment becomes a spare process, and does not just run the script."""
        if self._works is None:
            added = {"PYTHONPATH": SITE, VARIABLE: PROBE}
            probe = subprocess.run(
                [sys.executable, "-c", "pass"], env={**environment, **added}, check=False, timeout=PROBE_S,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            self._works = probe.returncode == PROBED
            if not self._works:
                self._cold(f"{sys.executable} does not look at PYTHONPATH")
        return self._works

    # -- when a round begins ---------------------------------------------------------------------------

    def take(
        self,
        local: int,
        arguments: tuple[str, ...],
        environment: Mapping[str, str],
        stdout: OutputFile,
        stderr: OutputFile,
    ) -> subprocess.Popen[bytes] | None:
        """The spare process of this rank, which is its worker from now on; None if there is none that can be."""
        self._wanted[local] = arguments, dict(environment)
        spare = self._spares.pop(local, None)
        if spare is None:
            return None
        spare.receive()
        if spare.state == "ready" and spare.process.poll() is None:
            files = tuple(file.fileno() for file in (stdout, stderr) if file is not None)
            if spare.send({"environment": dict(environment)}, files):
                spare.receive_answer()
            if spare.state in ("taken", "warm", "cold"):
                self._taken.append(spare)
                return spare.process
            spare.why = "" if spare.process.poll() is not None else "its spare process does not answer"
        if spare.process.poll() is not None and not spare.why:
            spare.why = f"its spare process ended with {spare.process.returncode}"
        if spare.why:
            self._cold(spare.why)
        # Every other one would be, too.
        if spare.state == "unfit":
            self._works = False
        spare.end()
        return None

    def close(self) -> None:
        """End those that wait."""
        while self._spares:
            self._spares.popitem()[1].end()

    def _cold(self, why: str) -> None:
        if why not in self._reported:
            self._reported.add(why)
            self._say(f"lockstep launch: workers start without libraries that were imported before: {why}.")
