from __future__ import annotations

import ast
import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import launch
from lockstep.errors import ConfigError
from lockstep.launch import LaunchPlan, Transport, from_line, parse, plan_from_data
from tests.launch.fakes import CANARY, Fakes, canaries
from tests.launch.helpers import run, start, wait_until
from tests.patching import module_of
from tests.refusals import expect_refusal

HOSTILE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20) | st.text(
    st.sampled_from(list(";$()`\"'\n\r\\ -#SBATCH=!")), max_size=30
)
INSIDE = {"SLURM_JOB_ID": "31", "SLURM_JOB_NUM_NODES": "2"}
PLAN = LaunchPlan(
    ("python", "t.py"), 4, 2, 2, transport=Transport("slurm"), environment={"OMP_NUM_THREADS": "3"}
)


def with_options(**options: str) -> LaunchPlan:
    named = {key.replace("_", "-"): value for key, value in options.items()}
    return replace(PLAN, transport=Transport("slurm", options=named))


def test_a_step_has_one_task_on_each_node_and_nothing_of_the_environment_but_names() -> None:
    environ = {**INSIDE, **canaries(), "NCCL_DEBUG": "INFO", "SLURM_JOB_CPUS_PER_NODE": "72(x2),36"}
    program = launch.srun(with_options(gres="gpu:8", exclusive=""), "ab" * 32, environ, "/work")
    step = program.arguments[: program.arguments.index(sys.executable)]
    for word in (
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--label",
        "--cpus-per-task=36",
        "--gres=gpu:8",
    ):
        assert word in step
    assert "--exclusive" in step and "--export=HOME,USER,LOGNAME,SHELL,TMPDIR" in step
    assert program.arguments[len(step) :] == (sys.executable, "-m", module_of(launch.Node).__name__)
    node = parse(program.stdin or "")
    assert (node.numbered_by, node.plan.machine_rank, node.environment) == (
        "slurm",
        None,
        {"NCCL_DEBUG": "INFO"},
    )
    assert "ab" * 32 not in " ".join(program.arguments)
    assert CANARY not in " ".join(program.arguments) + (program.stdin or "")
    assert program.shown(b" 1: text 2: more\n") == b"[machine 1] text 2: more\n"


def test_an_allocation_that_is_smaller_than_the_most_gives_fewer_machines() -> None:
    elastic = replace(PLAN, num_machines=4, min_machines=1)
    node = parse(launch.srun(elastic, "ab" * 32, INSIDE, "/").stdin or "").plan
    assert (node.num_machines, node.min_machines) == (2, 1)
    assert "--nodes=1-4" in launch.sbatch_arguments(elastic, {})


@settings(deadline=None)
@given(st.lists(HOSTILE, max_size=4))
def test_the_plan_in_a_batch_script_is_one_word_for_the_shell_and_no_option_for_sbatch(
    words: list[str],
) -> None:
    plan = replace(PLAN, command=("python", *words))
    first, second, end = launch.batch_script(plan).split("\n")
    assert (first, end) == ("#!/bin/sh", "")
    assert "\r" not in second
    program, *arguments = shlex.split(second.removeprefix("exec "))
    own = module_of(launch.batch_script).__name__
    assert (program, arguments[:2], len(arguments)) == (sys.executable, ["-m", own], 3)
    assert plan_from_data(from_line(arguments[2])).command == plan.command


def test_a_batch_job_is_submitted_by_the_users_options_and_the_defaults_that_they_leave() -> None:
    words = launch.sbatch_arguments(
        with_options(partition="gpu", time="1:00:00", account="me"), {"HOME": "/h"}
    )
    assert words[0] == "sbatch"
    for word in ("--partition=gpu", "--time=1:00:00", "--account=me", "--requeue", "--signal=USR1@90"):
        assert word in words
    assert "--cpus-per-task=12" in words and "--export=HOME" in words
    own = launch.sbatch_arguments(with_options(signal="TERM@300", no_requeue="", cpus_per_task="5"), {})
    assert "--signal=TERM@300" in own and "--cpus-per-task=5" in own and "--no-requeue" in own
    assert "--requeue" not in own and "--signal=USR1@90" not in own


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nodes": "3"}, "slurm_options has nodes"),
        ({"export": "ALL"}, "slurm_options has export"),
        ({"p": "gpu"}, "slurm_options has p"),
        ({"after_stop": "restart"}, "Use after-stop=requeue"),
    ],
)
def test_options_that_are_not_the_users_are_refused(options: dict[str, str], sentence: str) -> None:
    for command in (
        lambda plan: launch.srun(plan, "ab", INSIDE, "/"),
        lambda plan: launch.sbatch_arguments(plan, {}),
    ):
        expect_refusal(ConfigError, sentence, command, with_options(**options))


def test_a_secret_does_not_get_into_slurms_files() -> None:
    plan = replace(PLAN, transport=Transport("slurm", forward_env=("HF_TOKEN",)))
    expect_refusal(ConfigError, "HF_TOKEN", launch.sbatch_arguments, plan, {"HF_TOKEN": "x"})
    assert parse(launch.srun(plan, "ab" * 32, {**INSIDE, "HF_TOKEN": "x"}, "/").stdin or "").environment[
        "HF_TOKEN"
    ]


def test_sbatch_gets_the_script_and_its_exit_code_is_that_of_the_launch(fakes: Fakes) -> None:
    fakes.recorder("sbatch", "rest = sys.stdin.buffer.read()\nprint(repr(rest))\nsys.exit(7)")
    words = ["a b", "$(x)", "\n#SBATCH --wait", "é;'"]
    line = (
        "--slurm",
        "--nnodes",
        "2",
        "--nproc",
        "4",
        "--slurm-option",
        "partition=gpu",
        "--no-python",
        "echo",
        *words,
    )
    done = run(*line, **canaries())
    assert done.returncode == 7
    (call,) = fakes.calls("sbatch")
    assert call.stdin == b"#!/bin/sh\n"
    assert b"--nodes=2" in call.argv and b"--partition=gpu" in call.argv
    script = ast.literal_eval(done.stdout).decode()
    assert plan_from_data(from_line(shlex.split(script)[-1])).command == ("echo", *words)
    assert CANARY not in done.stdout + done.stderr + script + repr(call.argv)
    (export,) = [word for word in call.argv if word.startswith(b"--export=")]
    assert not set(export.removeprefix(b"--export=").decode().split(",")) & set(canaries())
    shown = (
        run(*line, "--dry-run").stdout
        if "--dry-run" in line
        else run("--dry-run", *line, **canaries()).stdout
    )
    assert shlex.join(["sbatch", *(word.decode() for word in call.argv)]) in shown
    assert CANARY not in shown


def test_srun_gets_the_document_and_signals_and_a_stopped_job_is_requeued(
    fakes: Fakes, tmp_path: Path
) -> None:
    ready, got = tmp_path / "ready", tmp_path / "got"
    fakes.recorder(
        "srun",
        f"open({str(ready)!r}, 'w').close()\nline = sys.stdin.buffer.readline()\nopen({str(got)!r}, 'wb').write(line)\n"
        "print('0: lockstep: all ranks stopped.\\n1: lockstep: all ranks stopped.')\nsys.exit(75)",
    )
    fakes.recorder("scontrol", reads=False)
    launcher = start(
        "--slurm", "--nproc", "1", "--slurm-option", "after-stop=requeue", "--no-python", "true", **INSIDE
    )
    try:
        wait_until(ready.exists, 60)
        launcher.send_signal(signal.SIGTERM)
        out, err = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert (launcher.returncode, got.read_bytes()) == (75, b"SIGTERM\n"), err
    assert out == "[machine 0] lockstep: all ranks stopped.\n"
    (requeue,) = fakes.calls("scontrol")
    assert requeue.argv == [b"requeue", b"31"]
    (call,) = fakes.calls("srun")
    assert parse(call.stdin).plan.num_machines == 2  # from the allocation
    assert parse(call.stdin).secret.encode() not in call.environ + b"".join(call.argv)


def test_without_slurm_the_missing_program_is_named() -> None:
    done = run("--slurm", "--nproc", "1", "--no-python", "true", PATH="/nonexistent")
    assert done.returncode == 2
    assert "sbatch is not installed here" in done.stderr
    assert os.environ["PATH"] != "/nonexistent"
