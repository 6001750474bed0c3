"""``lockstep top`` beside real jobs: what it shows of their ranks, and what its keys ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.history import JsonFields
from lockstep.launch import JobConnection, connect_here, connect_to, running_launches
from lockstep.runtime import PARTS
from tests.command import LOCKSTEP
from tests.launch.helpers import START_LIMIT_S, start, wait_until
from tests.launch.screen import InTerminal
from tests.observe.hang import training

SCRIPT = Path(training.__file__)


class Job:
    """A launch of the script, with a connection to it once it trains."""

    def __init__(self, out: Path, nproc: int) -> None:
        self.out, self.nproc = out, nproc
        words = ["--nproc", nproc, "--cpu", SCRIPT, out, "--steps", 10_000, "--pause", 0.02]
        self.process = start(*words, OMP_NUM_THREADS="1", TMPDIR=str(out))
        self.connection: JobConnection | None = None

    def connect(self) -> JobConnection:
        wait_until(lambda: self.steps(0) > 2 or self.process.poll() is not None, START_LIMIT_S)
        assert self.process.poll() is None, self.process.communicate()
        self.connection = connect_here()
        assert self.connection is not None
        # also the coordinator has heard of steps
        self.look_until(
            lambda now: [one.number("steps") > 0 for one in now.objects("ranks")] == [True] * self.nproc
        )
        return self.connection

    def steps(self, rank: int) -> int:
        path = self.out / f"rank-{rank}.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def look_until(self, condition: Callable[[JsonFields], bool]) -> JsonFields:
        assert self.connection is not None
        seen: list[JsonFields] = []

        def holds() -> bool:
            assert self.connection is not None
            seen.append(JsonFields(self.connection.look()))
            return condition(seen[-1])

        wait_until(holds, START_LIMIT_S)
        return seen[-1]

    def ended(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=START_LIMIT_S)
        return self.process.returncode, stderr


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Starts a job, which this process finds as it would in the temporary directory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    jobs: list[Job] = []

    def begin(nproc: int) -> Job:
        jobs.append(Job(tmp_path, nproc))
        return jobs[-1]

    yield begin
    for one in jobs:
        if one.connection is not None:
            one.connection.close()
        one.process.kill()
        one.process.communicate()


def test_a_run_in_its_folder_and_its_ranks_are_shown_and_keys_ask_for_stacks_and_stop_it(
    job: Callable[..., Job],
) -> None:
    run = job(2)
    connection = run.connect()
    seen = run.look_until(lambda now: now.mapping("latest").get("step", 0) > 2)
    assert [one.number("rank") for one in seen.objects("ranks")] == [0, 1]
    assert all(one.number("pid") > 0 and not one.text("ended") for one in seen.objects("ranks"))
    assert {one.text("part") for one in seen.objects("ranks")} <= set(PARTS)
    check_secret(run)
    connection.ask("stacks")
    stacks = [JsonFields(message) for _ in range(2) for message in connection.news(START_LIMIT_S)]
    assert {one.number("rank") for one in stacks} <= {0, 1}
    assert all("training.py" in str(one.fields["stack"]) for one in stacks)
    wait_until(lambda: (run.out / "run" / "measures.jsonl").exists(), START_LIMIT_S)
    top = InTerminal(
        *LOCKSTEP, "top", "--every", "0.2", run.out, size=(40, 120), variables={"TMPDIR": str(run.out)}
    )
    try:
        top.read_until(lambda text: "a step's time" in text and "own seconds of a step" in text)
        top.press("d")
        top.read_until(lambda text: "training.py" in text)
        top.press("d")
        top.press("x")
        top.read_until(lambda text: "Stop the run at its next step boundary?" in text)
        top.press("n")
        top.press("x")
        top.press("y")
        code, stderr = run.ended()
        assert code == 75, stderr
        assert "steps because of a request of lockstep top" in stderr
        top.read_until(lambda text: "is lost" in text)
        top.press("q")
        assert top.process.wait(START_LIMIT_S) == 0
    finally:
        top.close()
    assert run.steps(0) == run.steps(1)


def check_secret(run: Job) -> None:
    """The secret stands where its user alone can read it."""
    (launch,) = running_launches()
    (folder,) = run.out.glob("lockstep-*")
    assert {oct(os.stat(path).st_mode & 0o777) for path in folder.iterdir()} == {"0o600"}
    assert oct(os.stat(folder).st_mode & 0o777) == "0o700"
    secret = launch.secret.hex()
    assert secret not in repr(launch) and secret not in (folder / "launch.json").read_text()
    for path in (run.out / "run").glob("*"):
        assert secret not in path.read_text()
    connection = connect_to(("localhost", launch.address[1]), None)  # another name of this address
    assert JsonFields(connection.look()).objects("ranks")
    connection.close()
    folder.chmod(0o755)  # somebody else could have put it there
    assert running_launches() == []
    folder.chmod(0o700)
