"""The real ssh, with a server of this test's own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.testing import free_port
from tests.cluster.daemons import program, sshd
from tests.launch import training
from tests.launch.fakes import CANARY, canaries
from tests.launch.helpers import WAITING, check_ends_with, run, start

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture
def two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``hosta`` and ``hostb``, both this machine, for an ssh with a configuration of its own."""
    ssh = program("ssh")
    with sshd(tmp_path) as options:
        (tmp_path / "config").write_text(
            "Host hosta hostb\n" + "".join(f"  {option}\n" for option in options)
        )
        wrapper = tmp_path / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {ssh} -F {tmp_path}/config "$@"\n')
        wrapper.chmod(0o755)
        monkeypatch.setenv("PATH", str(wrapper.parent), prepend=":")
        monkeypatch.chdir(tmp_path)
        yield


@pytest.mark.usefixtures("two_hosts")
def test_two_hosts_train_together(tmp_path: Path) -> None:
    training.write_script(tmp_path)
    words = ["a b", "$(touch pwned)", "'\"\n;`x`", "-o", "é"]
    meeting = f"127.0.0.1:{free_port()}"
    line = ["--hosts", "hosta:1,hostb:1", "--rdzv", meeting, "--cpu", "train.py", *words]
    done = run(*line, OMP_NUM_THREADS="1", **canaries())
    assert done.returncode == training.EXIT_CODE, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[hosta] trained 0", "[hostb] trained 1"]
    assert len(re.findall(r"rank 1 .*failed", done.stderr)) == 1
    assert CANARY not in done.stdout + done.stderr
    training.check_results(tmp_path, words)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.usefixtures("two_hosts")
def test_killing_the_launcher_ends_the_workers(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    meeting = f"127.0.0.1:{free_port()}"
    launcher = start(
        "--hosts", "hosta:1,hostb:1", "--rdzv", meeting, "--no-python", sys.executable, "-c", WAITING
    )
    check_ends_with(launcher, tmp_path / "pids")


@pytest.mark.usefixtures("two_hosts")
def test_a_host_that_cannot_be_reached_is_named() -> None:
    done = run("--hosts", "no-such-host.invalid:1", "--no-python", "true")
    assert done.returncode == 255
    assert "[no-such-host.invalid] ssh: Could not resolve hostname" in done.stderr
