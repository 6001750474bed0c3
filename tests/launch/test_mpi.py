from __future__ import annotations

import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import launch
from lockstep.config import parse_hosts
from lockstep.errors import ConfigError
from lockstep.launch import FaultPolicy, LaunchPlan, Transport
from tests.launch.fakes import CANARY, Fakes, canaries
from tests.launch.helpers import run, start, wait_until
from tests.refusals import expect_refusal

HOSTILE = st.text(st.sampled_from(list(";$()`\"'\n\\ -x=MCA:,é")), max_size=30)
PLAN = LaunchPlan(("python", "t.py"), 2, transport=Transport("mpi"))
TWO = replace(
    PLAN, num_machines=2, min_machines=2, transport=Transport("mpi", parse_hosts("hosta:4,me@hostb:4"))
)


@settings(deadline=None)
@given(st.lists(HOSTILE, max_size=4), st.dictionaries(st.sampled_from(["NCCL_A", "LANG"]), HOSTILE))
def test_arguments_go_as_they_are_and_of_the_environment_only_names(
    words: list[str], environment: dict[str, str]
) -> None:
    program = launch.mpirun(replace(PLAN, command=("python", *words)), {**environment, **canaries()}, 29501)
    border = program.arguments.index("--")
    assert program.arguments[border + 1 :] == ("python", *words)
    own = program.arguments[:border]
    names = {name for flag, name in pairwise(own) if flag == "-x"}
    assert (
        names == set(program.environment) == {*environment, "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"}
    )
    assert {name: program.environment[name] for name in environment} == environment
    assert (program.environment["MASTER_ADDR"], program.environment["MASTER_PORT"]) == ("127.0.0.1", "29501")
    assert CANARY not in " ".join(program.arguments)


def test_hosts_take_the_processes_of_a_machine_each_and_meet_at_the_first() -> None:
    program = launch.mpirun(TWO, {}, 0)
    own = program.arguments[: program.arguments.index("--")]
    assert own[1:3] == ("-np", "4")
    assert own[own.index("--host") + 1] == "hosta:2,me@hostb:2"
    assert (program.environment["MASTER_ADDR"], program.environment["MASTER_PORT"]) == ("hosta", "29500")
    said = launch.mpirun(replace(TWO, address="10.0.0.1", port=1234), {}, 0).environment
    assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("10.0.0.1", "1234")


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (replace(TWO, min_machines=1), "min_machines"),
        (replace(PLAN, fault_policy=FaultPolicy(max_restarts=2)), "max_restarts 2"),
        (replace(TWO, transport=Transport("mpi")), "Set --hosts"),
        (replace(PLAN, log_dir="logs"), "--log-dir"),
    ],
)
def test_what_mpirun_cannot_do_is_refused(plan: LaunchPlan, sentence: str) -> None:
    expect_refusal(ConfigError, sentence, launch.mpirun, plan, {}, 0)


def test_hydra_is_called_in_its_own_words() -> None:
    program = launch.mpirun(TWO, {"LANG": "C"}, 0, hydra=True)
    names = "I_MPI_PIN,LANG,MASTER_ADDR,MASTER_PORT,OMP_NUM_THREADS"
    expected = ("mpiexec.hydra", "-n", "4", "-ppn", "2", "-prepend-pattern", "[1,%r]<stdout>:", "-hosts",
                "hosta,me@hostb", "-genvlist", names, "python", "t.py")  # fmt: skip
    assert program.arguments == expected
    alone = launch.mpirun(PLAN, {}, 29501, hydra=True).arguments
    assert alone[alone.index("-launcher") :][:4] == ("-launcher", "fork", "-hosts", "localhost")


@pytest.mark.parametrize(
    ("version", "hydra"),
    [
        ("mpirun (Open MPI) 5.0.11", False),
        ("HYDRA build details:\n    Version:                                 5.0.2", True),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)", True),
    ],
)
def test_mpirun_says_which_it_is(fakes: Fakes, version: str, hydra: bool) -> None:
    fakes.recorder("mpirun", f"print({version!r})")
    assert launch.is_hydra() is hydra


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"[1,0]<stdout>:text\n", b"[rank 0] text\n"),
        (b"[1,12]<stderr>:a[1,12]<stderr>:b\n", b"[rank 12] ab\n"),
        (b"[1,0]<stdout>:a[1,1]<stdout>:b\n", b"[rank 0] a\n[rank 1] b\n"),
        (b"[1,1]<stdout>:signal[1,1]<stdout>: 10[1,1]<stdout>:\n", b"[rank 1] signal 10\n"),
        (b"mpirun: no tag\n", b"mpirun: no tag\n"),
    ],
)
def test_lines_get_their_rank(line: bytes, shown: bytes) -> None:
    assert launch.tagged(line) == shown


def test_mpirun_is_called_as_the_dry_run_shows_and_its_exit_code_is_that_of_the_launch(fakes: Fakes) -> None:
    fakes.recorder("mpirun", "print('[1,1]<stdout>:text')\nsys.exit(9)")
    line = (
        "--mpi",
        "--hosts",
        "hosta:2,hostb:2",
        "--forward-env",
        "HF_TOKEN",
        "--no-python",
        "echo",
        "a b",
        "$(x)\n;",
    )
    done = run(*line, **canaries())
    assert (done.returncode, done.stdout) == (9, "[rank 1] text\n")
    _, call = fakes.calls("mpirun")  # it is asked for its version first
    assert call.argv[call.argv.index(b"--") :] == [b"--", b"echo", b"a b", b"$(x)\n;"]
    assert CANARY.encode() not in b"".join(call.argv)
    assert b"HF_TOKEN" in call.argv  # its name: the value is in the environment of mpirun
    shown = run("--dry-run", *line, **canaries())
    assert "  HF_TOKEN=<secret>\n" in shown.stdout
    assert CANARY not in shown.stdout + shown.stderr
    assert "--host hosta:2,hostb:2" in shown.stdout and "-- echo 'a b'" in shown.stdout


def test_the_first_signal_asks_the_workers_to_stop_and_the_second_ends(fakes: Fakes, tmp_path: Path) -> None:
    note = tmp_path / "signals"
    fakes.recorder(
        "mpirun",
        "import signal, time\n"
        "if '--version' in sys.argv: sys.exit()\n"
        "def got(number, _):\n"
        f"    open({str(note)!r}, 'a').write(signal.Signals(number).name + ' ')\n"
        "    if number == signal.SIGTERM: os._exit(143)\n"
        "signal.signal(signal.SIGUSR1, got); signal.signal(signal.SIGTERM, got)\n"
        f"open({str(note)!r}, 'w').close()\n"
        "while True: time.sleep(0.05)",
        reads=False,
    )
    launcher = start("--mpi", "--nproc", "2", "--no-python", "true")
    try:
        wait_until(note.exists, 60)
        launcher.send_signal(signal.SIGTERM)
        wait_until(lambda: note.read_text() == "SIGUSR1 ", 20)
        time.sleep(0.1)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert (launcher.returncode, note.read_text()) == (143, "SIGUSR1 SIGTERM ")
