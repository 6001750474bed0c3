from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lockstep.config import Host, parse_hosts, read_hostfile
from lockstep.errors import ConfigError
from lockstep.launch import (
    SSH,
    LaunchPlan,
    Node,
    Transport,
    meeting_point,
    parse,
    ssh_arguments,
    ssh_programs,
)
from lockstep.testing import free_port
from tests.launch import training
from tests.launch.fakes import CANARY, Fakes, canaries
from tests.launch.helpers import WAITING, check_ends_with, run, start, wait_until
from tests.patching import module_of
from tests.refusals import expect_refusal

HOSTILE = st.text(st.sampled_from(list(";$()`\"'\n\\ -o*?~#&|<>%{}!\t\r=ProxyCommandé")), max_size=30)
NODE = (sys.executable, "-m", module_of(Node).__name__)
REMOTE = shlex.join(NODE)
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SECRET = "5e" * 32


def plan_for(command: list[str], names: str = "hosta,hostb") -> LaunchPlan:
    listed = parse_hosts(names)
    return LaunchPlan(
        tuple(command),
        2,
        len(listed),
        len(listed),
        transport=Transport("hosts", listed),
        environment={"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is looked up."""
    monkeypatch.setattr(module_of(ssh_programs), "is_here", lambda _host: False)


# -- lists of hosts ----------------------------------------------------------------------------------


def test_a_list_says_names_users_and_slots() -> None:
    assert parse_hosts("a,me@b:8,[::1]:2,10.0.0.1") == (
        Host("a"),
        Host("b", 8, "me"),
        Host("::1", 2),
        Host("10.0.0.1"),
    )
    assert ",".join(map(str, parse_hosts("a,me@b:8,[::1]:2"))) == "a,me@b:8,[::1]:2"


@FUZZ
@given(st.text(max_size=30) | HOSTILE)
@example("-oProxyCommand=touch /tmp/x")
@example("a -o ProxyCommand=x")
@example("me@-oX")
def test_what_is_accepted_as_a_host_cannot_be_an_option_or_anything_for_a_shell(text: str) -> None:
    try:
        found = parse_hosts(text)
    except ConfigError:
        return
    for host in found:
        assert not host.target.startswith("-")
        assert set(host.target) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:_-@%")
        assert parse_hosts(str(host)) == (host,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1\nn1\nn2\nn1\n", "n1:3,n2:1"),  # srun hostname
        ("n1 slots=4 max_slots=8\nn2 slots=2 max-slots=2\n", "n1:4,n2:2"),  # Open MPI
        ("n1 slots=8 # fast\nn2 slots=8 rack=2 spare\n", "n1:8,n2:8"),  # DeepSpeed reads no further
        ("n1:4 user=me\nn2:4\n", "n1:4,n2:4"),  # MPICH
        ("n1\nn2\n", "n1,n2"),
    ],
)
def test_hostfiles_as_people_have_them(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    assert ",".join(map(str, read_hostfile(path))) == expected


def test_a_hostfile_of_deepspeed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text(
        "# two machines\nworker-1 slots=4\n\nworker-2 slots=4 # the other\nworker-3:2\nworker-4\n"
    )
    expected = (Host("worker-1", 4), Host("worker-2", 4), Host("worker-3", 2), Host("worker-4"))
    assert read_hostfile(path) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\nb slot=4\n", ":2: 'slot=4' is not slots=N"),
        ("a\na\na slots=2\n", ":3: host a is given twice"),
        ("a slots=2\na\n", ":2: host a is given twice"),
        ("a slots=four\n", ":1: 'four'"),
        ("a slots=0\n", ":1: '0'"),
        ("-oProxyCommand=x slots=1\n", ":1: '-oProxyCommand=x'"),
        ("a;b\n", ":1: 'a;b'"),
        ("1.2.3\n", ":1: '1.2.3'"),
        ("# nothing\n", "names no host"),
        (b"\xff\xfe", "it is not UTF-8 text"),
    ],
)
def test_a_bad_hostfile_is_refused_with_its_line(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


# -- what is started ---------------------------------------------------------------------------------


def test_a_host_that_is_this_machine_needs_no_ssh() -> None:
    for name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        assert ssh_arguments(Host(name)) == NODE
    for host in (Host("192.0.2.7"), Host("localhost", user="me"), Host("no-such-host.invalid")):
        assert ssh_arguments(host)[0] == "ssh"
        assert ssh_arguments(host)[-3:] == ("--", host.target, REMOTE)


@FUZZ
@given(
    st.lists(HOSTILE, max_size=4), st.dictionaries(st.sampled_from(["NCCL_A", "LANG", "PYTHONPATH"]), HOSTILE)
)
def test_arguments_and_environment_reach_the_far_end_byte_for_byte_and_never_a_shell(
    elsewhere: None, words: list[str], environment: dict[str, str]
) -> None:
    environ = {**environment, **canaries()}
    started = ssh_programs(plan_for(["python", *words]), SECRET, environ, "/a 'folder'")
    for rank, program in enumerate(started):
        assert program.arguments[-3:] == ("--", ("hosta", "hostb")[rank], REMOTE)
        assert program.arguments[:-3] == SSH
        node = parse(program.stdin or "")
        assert node.plan.command == ("python", *words)
        assert node.environment == environment
        assert (node.plan.machine_rank, node.plan.address, node.plan.port) == (rank, "hosta", 29500)
        assert CANARY not in (program.stdin or "") + " ".join(program.arguments)
        assert SECRET not in " ".join(program.arguments) and node.secret == SECRET


def test_several_machines_cannot_meet_at_a_name_that_each_has_for_itself() -> None:
    expect_refusal(ConfigError, "localhost", meeting_point, plan_for(["x"], "localhost,hostb"))


def test_ssh_is_called_once_for_each_host_with_no_secret_in_its_arguments(fakes: Fakes) -> None:
    fakes.recorder("ssh")
    done = run("--hosts", "hosta:2,me@hostb:2", "--no-python", "echo", "a b", "$(x)", "\n;'", **canaries())
    assert done.returncode == 0, done.stderr
    calls = sorted(fakes.calls("ssh"), key=lambda call: call.argv)
    assert [call.argv[-2] for call in calls] == [b"hosta", b"me@hostb"]
    secrets = set()
    for call in calls:
        assert call.argv[-1] == REMOTE.encode()
        node = parse(call.stdin)
        assert node.plan.command == ("echo", "a b", "$(x)", "\n;'")
        assert node.directory == os.getcwd()
        assert CANARY.encode() not in b"".join(call.argv) + call.stdin
        assert node.secret.encode() not in b"".join(call.argv) + call.environ
        secrets.add(node.secret)
    assert len(secrets) == 1 and len(secrets.pop()) == 64
    assert CANARY not in done.stdout + done.stderr
    shown = run("--hosts", "hosta:2,me@hostb:2", "--dry-run", "--no-python", "echo", "a b", **canaries())
    assert f"-- hosta {shlex.quote(REMOTE)}\n" in shown.stdout
    assert '"secret": "<secret>"' in shown.stdout and CANARY not in shown.stdout + shown.stderr


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("sys.exit(75)", 75),
        ("sys.exit(255)", 255),
        (
            "import time; first = 'hosta' in sys.argv; time.sleep(0 if first else 1); sys.exit(124 if first else 3)",
            124,
        ),
        ("sys.exit(255 if 'hosta' in sys.argv else 3)", 3),  # a lost connection is not the cause
    ],
)
def test_the_exit_code_is_that_of_the_machine_that_failed_first(then: str, code: int, fakes: Fakes) -> None:
    fakes.recorder("ssh", then)
    assert run("--hosts", "hosta:1,hostb:1", "--no-python", "true").returncode == code


def test_output_has_its_host_and_what_both_launchers_say_is_said_once(fakes: Fakes) -> None:
    failed = "rank 1 ' + ('failed first' if 'hosta' in sys.argv else 'on hosta failed')"
    said = f"sys.stderr.write('lockstep: all the same.\\nlockstep: {failed} + ' (boom).\\n')"
    fakes.recorder("ssh", f"print('from', sys.argv[-2], flush=True)\nprint('no line end', end='')\n{said}")
    done = run("--hosts", "hosta:1,hostb:1", "--no-python", "true")
    assert sorted(done.stdout.splitlines()) == [
        "[hosta] from hosta",
        "[hosta] no line end",
        "[hostb] from hostb",
        "[hostb] no line end",
    ]
    first, second = sorted(line.partition("] lockstep: ")[2] for line in done.stderr.splitlines())
    assert first == "all the same."
    assert second in ("rank 1 failed first (boom).", "rank 1 on hosta failed (boom).")


def test_signals_travel_as_lines_and_a_missing_ssh_is_said(fakes: Fakes, tmp_path: Path) -> None:
    note = tmp_path / "got-"
    fakes.recorder(
        "ssh",
        f"name = {str(note)!r} + sys.argv[-2]\nopen(name + '.ready', 'w').close()\n"
        "line = sys.stdin.buffer.readline()\nopen(name, 'wb').write(line)\nsys.exit(75)",
    )
    launcher = start("--hosts", "hosta:1,hostb:1", "--no-python", "true")
    try:
        wait_until(lambda: all(Path(f"{note}{name}.ready").exists() for name in ("hosta", "hostb")), 60)
        launcher.send_signal(signal.SIGUSR1)
        launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 75
    assert {Path(f"{note}{name}").read_bytes() for name in ("hosta", "hostb")} == {b"SIGUSR1\n"}
    missing = run("--hosts", "hosta:1", "--no-python", "true", PATH="/nonexistent")
    assert missing.returncode == 2
    assert "ssh is not installed here" in missing.stderr


# -- two machines for real ---------------------------------------------------------------------------


def test_two_hosts_train_together(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.ssh()
    training.write_script(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["a b", "$(touch pwned)", "'\"\n;`x`", "-o", "é"]
    meeting = f"127.0.0.1:{free_port()}"
    line = ["--hosts", "hosta:1,hostb:1", "--rdzv", meeting, "--cpu", "train.py", *words]
    done = run(*line, OMP_NUM_THREADS="1", HF_TOKEN=CANARY)
    assert done.returncode == training.EXIT_CODE, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[hosta] trained 0", "[hostb] trained 1"]
    assert len(re.findall(r"rank 1 .*failed", done.stderr)) == 1
    training.check_results(tmp_path, words)
    assert not (tmp_path / "pwned").exists()


def test_killing_the_launcher_ends_the_workers_of_all_hosts(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.ssh()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pids").mkdir()
    launcher = start(
        "--hosts", "hosta:1,hostb:1", "--rdzv", f"127.0.0.1:{free_port()}",
        "--no-python", sys.executable, "-c", WAITING, OMP_NUM_THREADS="1",
    )  # fmt: skip
    check_ends_with(launcher, tmp_path / "pids")
