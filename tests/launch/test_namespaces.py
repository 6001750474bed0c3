"""Two machines as two network namespaces, so that one can be lost as machines are: cut off, without a word."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch import elastic_run
from tests.launch.helpers import COMMAND, START_LIMIT_S, environment, wait_until
from tests.launch.ledger import committed_step, samples_seen, worlds

SAMPLES = 40
PORT = 29400

FILE = f"""
num_machines: "1:2"
num_processes: 2
main_process_ip: 10.83.1.1
main_process_port: {PORT}
use_cpu: true
"""


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=30)


class Namespaces:
    """Two namespaces, joined by a cable with an end in each: 10.83.1.1 and 10.83.1.2."""

    def __init__(self) -> None:
        self.names = [f"lockstep{os.getpid()}m{rank}" for rank in (0, 1)]

    def build(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        near, far = self.names
        ip("-n", near, "link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", far)
        for rank, name in enumerate(self.names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"10.83.1.{rank + 1}/24", "dev", f"cable{rank}")
            ip("-n", name, "link", "set", f"cable{rank}", "up")

    def cut(self, rank: int) -> None:
        """Take one end of the cable down: no packet leaves or arrives any more, nor any end of a connection."""
        ip("-n", self.names[rank], "link", "set", f"cable{rank}", "down")

    def inside(self, rank: int) -> list[str]:
        """What begins a command line to run it on a machine."""
        return ["ip", "netns", "exec", self.names[rank]]

    def remove(self) -> None:
        for name in self.names:
            ip("netns", "delete", name, check=False)


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the program ip")
    made = Namespaces()
    try:
        made.build()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr!r}")
    yield made
    made.remove()


def listening(namespaces: Namespaces, rank: int) -> list[tuple[str, int]]:
    """Addresses and ports on which anything listens on a machine."""
    command = [*namespaces.inside(rank), "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    rows = [line.split() for line in output.splitlines()]
    found = []
    for row in rows:
        if row[0] != "sl" and row[3] == "0A":  # TCP_LISTEN
            address, _, port = row[1].rpartition(":")
            octets = [str(octet) for octet in reversed(bytes.fromhex(address))]
            found.append((".".join(octets) if len(octets) == 4 else address, int(port, 16)))
    return found


class Machine:
    """A launcher on one of the two machines."""

    def __init__(self, namespaces: Namespaces, rank: int, folder: Path, attempt: int = 0) -> None:
        self._errors = folder / f"machine-{rank}-{attempt}.err"
        script = [elastic_run.__file__, str(folder), str(SAMPLES), "0"]
        command = [
            *COMMAND,
            "--config-file",
            str(folder / "machines.yaml"),
            "--machine-rank",
            str(rank),
            *script,
        ]
        variables = environment(XDG_CONFIG_HOME=str(folder / "config"), OMP_NUM_THREADS="1")
        with self._errors.open("w") as errors:
            self.launcher = subprocess.Popen(
                [*namespaces.inside(rank), *command], env=variables, stdout=subprocess.DEVNULL, stderr=errors
            )

    def said(self) -> str:
        return self._errors.read_text()

    def kill(self) -> None:
        """SIGKILL to all its processes: it loses power."""
        root = psutil.Process(self.launcher.pid)
        for process in [*root.children(recursive=True), root]:
            process.kill()
        self.launcher.wait()

    def end(self) -> None:
        self.launcher.terminate()
        try:
            self.launcher.wait(10)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait()


@pytest.mark.exhaustive  # test_elastic.py does it without network namespaces
def test_machines_that_die_come_back_and_are_cut_off_cost_no_sample(
    tmp_path: Path, namespaces: Namespaces
) -> None:
    (tmp_path / "machines.yaml").write_text(FILE)
    (tmp_path / "slow").touch()
    machines = [Machine(namespaces, rank, tmp_path) for rank in (0, 1)]
    try:
        wait_until(lambda: committed_step(tmp_path) >= 1, START_LIMIT_S)
        sockets = listening(namespaces, 0) + listening(namespaces, 1)
        assert ("10.83.1.1", PORT) in sockets
        assert {address for address, _ in sockets} <= {"10.83.1.1", "10.83.1.2", "127.0.0.1"}, sockets

        machines[1].kill()
        wait_until(lambda: committed_step(tmp_path, of_round=1) > 0, START_LIMIT_S)
        machines.append(Machine(namespaces, 1, tmp_path, attempt=1))
        wait_until(lambda: committed_step(tmp_path, of_round=2) > 0, START_LIMIT_S)

        namespaces.cut(1)
        wait_until(lambda: "restart 2 of 1000" in machines[0].said(), START_LIMIT_S)
        (tmp_path / "slow").unlink()
        assert machines[0].launcher.wait(START_LIMIT_S) == 0, machines[0].said()
        name = socket.gethostname()
        assert f"restart 1 of 1000: machine {name} was lost (its connection closed)" in machines[0].said()
        assert f"machine {name} joins; all workers start again in a new round." in machines[0].said()
        assert f"restart 2 of 1000: machine {name} was lost (it was silent for 5 s)" in machines[0].said()
        assert (
            "the machine that hosts this launch, 10.83.1.1:29400, was silent for 4 s." in machines[2].said()
        )
        assert worlds(tmp_path) == [2, 1, 2, 1]
        assert sorted(samples_seen(tmp_path)) == list(range(SAMPLES)), "a sample was lost or repeated"
    finally:
        for machine in machines:
            machine.end()
