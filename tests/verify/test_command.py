"""``lockstep check`` as people call it: its answers, its exit codes, and scripts that cannot be checked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from lockstep.cli import cli
from lockstep.errors import ConfigError
from lockstep.verify import ParityCheck, RunSpec
from tests.command import LOCKSTEP
from tests.verify.forks import ForkedRun, ForkServer

HERE = Path(__file__).parent
Check = Callable[..., tuple[int, str, str]]
COMMAND = [*LOCKSTEP, "check"]


def check(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and messages."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def check_in_forks() -> Iterator[Check]:
    """The same, whose runs are forks of a process that has torch in memory; other tests here start processes anew."""
    server = ForkServer()  # without accelerate, whose loaders know the rows of all ranks

    def check(*arguments: str) -> tuple[int, str, str]:
        def start(self: ParityCheck, spec: RunSpec) -> ForkedRun:
            request = self._request
            return ForkedRun(server, spec, request.program.words, int(request.timeout_s))

        with mock.patch.object(ParityCheck, "_start", start):
            said = CliRunner().invoke(cli, ["check", *arguments])
        return said.exit_code, said.stdout, said.stderr

    yield check
    server.close()


def script(name: str) -> str:
    return str(HERE / f"script_{name}.py")


@pytest.mark.parametrize(
    "words",
    [
        ("wrapped", "no_sync"),
        ("wrapped", "shared_batch"),
        ("wrapped", "own_buffers"),
        ("wrapped", "fully_shard"),
        ("accelerate",),
        ("accelerate", "one_cycle"),
    ],
    ids=" ".join,
)
def test_scripts_of_others_agree(check_in_forks: Check, words: tuple[str, ...]) -> None:
    if "accelerate" in words:
        pytest.importorskip("accelerate")
    code, said, errors = check_in_forks("--wrapped", script(words[0]), *words[1:])
    assert code == 0, said + errors
    assert said.startswith("OK: 2 ranks match one process")
    assert "of 3 steps agree" in said
    assert ("computes its batch size from the number of processes" in said) == ("shared_batch" in words)


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (
            ("--steps", "5", script("weighted")),
            [
                "OK: 2 ranks with ddp match one process",
                "4 steps agree",
                "Steps end after 4: an epoch ends there with a batch of 1 row for a rank, not 4.",
            ],
        ),
        (("--steps", "5", script("odd"), "validates"), ["of 5 steps agree"]),
        (
            ("--parallel", "zero=1", script("odd"), "told"),
            ["The script computes its learning rate from the number of processes"],
        ),
    ],
    ids=["weighted", "validates", "told"],
)
def test_scripts_with_an_accelerator_agree(
    check_in_forks: Check, words: tuple[str, ...], notes: list[str]
) -> None:
    code, said, errors = check_in_forks(*words)
    assert code == 0, said + errors
    assert [note for note in notes if note not in said] == []


def test_a_gradient_that_is_doubled_is_named(tmp_path: Path) -> None:
    path, page = tmp_path / "report.json", tmp_path / "report.html"
    code, said, errors = check(
        "--wrapped", "--json", str(path), "--html", str(page), script("wrapped"), "doubled"
    )
    assert code == 1, said + errors
    first = "step 1, backward: the gradient of `3.weight` is 2.00 times the reference"
    assert said.startswith(first)
    assert (
        "Everything before it agrees. It looks as if it was summed over 2 ranks in place of averaged." in said
    )
    report = json.loads(path.read_text("utf-8"))
    assert report["agrees"] is False
    assert report["sentence"].startswith(first)
    assert (
        report["findings"][0] | {"name": "3.weight", "kind": "gradient", "step": 1} == report["findings"][0]
    )
    assert "3.weight" in page.read_text("utf-8")


def test_a_trace_is_kept_and_compared_with(check_in_forks: Check, tmp_path: Path) -> None:
    check = check_in_forks
    trace = str(tmp_path / "kept.trace")
    assert check("--nproc", "1", "--record", trace, script("odd"), "plain")[0] == 0
    code, said, errors = check("--nproc", "1", "--against", trace, script("odd"), "plain")
    assert code == 0, said + errors
    code, said, errors = check("--nproc", "2", "--against", trace, script("odd"), "plain")
    assert code == 2
    assert "was recorded for 1 ranks with batches of their own" in errors
    for flag, asked in (("--seed", "0"), ("--steps", "3")):
        code, said, errors = check("--nproc", "1", flag, "5", "--against", trace, script("odd"), "plain")
        assert (code, said) == (2, "")
        assert f"was recorded with {flag} {asked}, but this check has {flag} 5" in errors


def test_a_checkpoint_that_a_script_loads_is_named_and_the_end_of_the_script(
    check_in_forks: Check, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    code, said, errors = check_in_forks("--steps", "8", script("odd"), "loads", folder)
    assert code == 0, said + errors
    assert (
        f"The script loads the checkpoint {folder} before step 1: what is compared goes on from there" in said
    )
    assert "The script itself makes no more than 6 steps." in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("odd", "no_step"), "ended before its first optimizer step"),
        (("odd", "raises"), "ValueError: there is no data"),
        (("odd", "unseeded"), "Two reference runs already differ at step 1, data"),
        (("odd", "short"), "an epoch ends there with 1 batch for 2 ranks."),
        (("odd", "twice"), "then trains again on the same batch"),
        (("odd", "two"), "The script makes two Accelerators that prepare objects"),
        (
            ("odd", "leaves"),
            "The script leaves its loop over a loader after 3 batches, before the epoch ends",
        ),
        (("odd", "alone"), "The ranks take steps of their own (LocalSGD, DiLoCo or BoundedStaleness)"),
        (("odd", "by_hand"), "sets its learning rate without a scheduler"),
        (("wrapped", "own_rows", "--wrapped"), "picks the rows of each process itself"),
        (("odd", "plain", "--wrapped"), "The script makes an Accelerator of Lockstep"),
    ],
    ids=str,
)
def test_what_cannot_be_checked_is_said(check_in_forks: Check, words: tuple[str, ...], sentence: str) -> None:
    flags = [word for word in words if word == "--wrapped"]
    code, said, errors = check_in_forks(*flags, script(words[0]), *words[1 : len(words) - len(flags)])
    assert (code, said) == (2, ""), said + errors
    assert sentence in " ".join(errors.split())


def test_a_script_that_starts_its_process_group_is_told_of_wrapped() -> None:
    code, said, errors = check(script("wrapped"))
    assert (code, said) == (2, ""), said + errors
    assert "failed, because the script starts its process group itself." in " ".join(errors.split())


def test_a_run_that_hangs_is_ended() -> None:
    code, _, errors = check("--timeout", "3", script("odd"), "hangs")
    assert code == 2
    assert "The reference has not made 3 steps in 3 s." in errors


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--nproc", "3", "--parallel", "tp=2"], "spreads one model over 2 processes"),
        (["--parallel", "zerro=3"], "zero"),
        (["--wrapped", "--parallel", "ddp"], "--wrapped is for scripts that spread their models themselves"),
        (["--reference", "ddp", "--against", __file__], "both say what to compare with"),
        (["--against", __file__], "cannot be read as a trace"),
    ],
)
def test_wrong_flags_are_refused_before_anything_runs(flags: list[str], sentence: str) -> None:
    said = CliRunner().invoke(cli, ["check", *flags, script("odd"), "plain"])
    assert said.exit_code == 2 or isinstance(said.exception, ConfigError)
    assert sentence in f"{' '.join(said.stderr.split())} {said.exception}"
