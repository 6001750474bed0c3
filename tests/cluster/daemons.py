"""Real services of a cluster on this machine, in temporary directories: munged, slurmctld, slurmd, sshd."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lockstep.testing import free_port

START_LIMIT_S = 30.0
FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin"


def program(name: str) -> str:
    """The path of a program; skips the test, saying which is missing."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:{FOLDERS}")
    if found is None:
        pytest.skip(f"{name} is not installed here; `make test-cluster` installs it when run by root")
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not start within {START_LIMIT_S:.0f} s"
        time.sleep(0.05)


@contextlib.contextmanager
def service(command: Sequence[object], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs in the foreground, ended with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Munge and Slurm with two nodes, both this machine; yields what its commands need in the environment."""
    munged, slurmctld, slurmd = program("munged"), program("slurmctld"), program("slurmd")
    for name in ("srun", "sbatch", "scontrol"):
        program(name)
    if os.geteuid() != 0:
        pytest.skip("slurmd starts steps for users, which needs root; run `make test-cluster` as root")
    folder.chmod(0o755)
    key, munge = folder / "munge.key", folder / "munge"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    munge.mkdir(mode=0o755)
    name = socket.gethostname().split(".")[0]
    state = folder / "state"
    state.mkdir()
    configuration = folder / "slurm.conf"
    controller, first, second = free_port(), free_port(), free_port()
    configuration.write_text(
        "\n".join(
            (
                "ClusterName=lockstep",
                f"SlurmctldHost={name}(127.0.0.1)",
                f"SlurmctldPort={controller}",
                f"SlurmUser={getpass.getuser()}",
                "AuthType=auth/munge",
                f"AuthInfo=socket={munge}/socket",
                "CredType=cred/munge",
                f"StateSaveLocation={state}",
                f"SlurmdSpoolDir={folder}/spool-%n",
                f"SlurmctldPidFile={folder}/slurmctld.pid",
                f"SlurmdPidFile={folder}/slurmd-%n.pid",
                f"SlurmctldLogFile={folder}/slurmctld.log",
                f"SlurmdLogFile={folder}/slurmd-%n.log",
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "SelectType=select/cons_tres",
                "SlurmdParameters=config_overrides",
                "MpiDefault=none",
                "ReturnToService=2",
                "JobRequeue=1",
                "KillWait=5",
                "MinJobAge=300",
                "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0",
                f"NodeName=n1 NodeHostname={name} NodeAddr=127.0.0.1 Port={first} CPUs=4 RealMemory=100",
                f"NodeName=n2 NodeHostname={name} NodeAddr=127.0.0.1 Port={second} CPUs=4 RealMemory=100",
                "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4",
                "",
            )
        )
    )
    environment = {"SLURM_CONF": str(configuration)}
    munge_command = [
        munged, "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={key}", f"--pid-file={munge}/pid",
        f"--log-file={munge}/log", f"--seed-file={munge}/seed", "--num-threads=2",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(service(munge_command, folder / "munged.out"))
        wait_for((munge / "socket").exists, "munged")
        stack.enter_context(
            service([slurmctld, "-D", "-i", "-f", configuration], folder / "c.out", **environment)
        )
        for node in ("n1", "n2"):
            command = [slurmd, "-D", "-f", configuration, "-N", node]
            stack.enter_context(service(command, folder / f"{node}.out", **environment))
        wait_for(lambda: _nodes(environment) == ["idle", "idle"], "slurmd")
        yield environment


def _nodes(environment: dict[str, str]) -> list[str]:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[list[str]]:
    """A server of this user on a free port; yields the options with which ssh reaches it."""
    server, keygen = program("sshd"), program("ssh-keygen")
    program("ssh")
    for name in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    authorized = folder / "authorized"
    authorized.write_bytes((folder / "user.pub").read_bytes())
    configuration = folder / "sshd_config"
    configuration.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {authorized}\n"
        f"PidFile {folder}/sshd.pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    known = folder / "known_hosts"
    host_key = (folder / "host.pub").read_text().split()[:2]
    known.write_text(f"[127.0.0.1]:{port} {' '.join(host_key)}\n")
    with service([server, "-D", "-e", "-f", configuration], folder / "sshd.out"):
        wait_for(lambda: _listens(port), "sshd")
        yield [f"Port {port}", "HostName 127.0.0.1", f"IdentityFile {folder}/user", f"UserKnownHostsFile {known}",
               f"HostKeyAlias [127.0.0.1]:{port}", "IdentitiesOnly yes", f"User {getpass.getuser()}"]  # fmt: skip


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
