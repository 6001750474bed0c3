from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.runtime import is_consequence, report_of

FAIL = "from lockstep.runtime import install_excepthook; install_excepthook(); raise {error}"


def run(error: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FAIL.format(error=error)]
    return subprocess.run(command, env={**environ}, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def python_path() -> str:
    return ":".join(path for path in sys.path if path)


def test_an_uncaught_error_is_reported_in_torchs_format_and_printed(tmp_path: Path, python_path: str) -> None:
    file = tmp_path / "error.json"
    done = run("ValueError('boom')", TORCHELASTIC_ERROR_FILE=str(file), PYTHONPATH=python_path)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: boom") == 1
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))  # torch reads it
    assert failure.timestamp > 0
    assert failure.error_file_data["message"]["message"] == "ValueError: boom"


def test_without_an_agent_nothing_changes(python_path: str) -> None:
    done = run("ValueError('boom')", PYTHONPATH=python_path)
    assert (done.returncode, done.stderr.count("ValueError: boom")) == (1, 1)


def test_exiting_on_purpose_reports_nothing(tmp_path: Path, python_path: str) -> None:
    file = tmp_path / "error.json"
    assert run("SystemExit(3)", TORCHELASTIC_ERROR_FILE=str(file), PYTHONPATH=python_path).returncode == 3
    assert not file.exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:40000"), True),
        (RuntimeError("Read error [127.0.0.1]:3: Connection reset by peer"), True),
        (ValueError("Connection closed by peer"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_only_torchs_words_for_a_lost_peer_are_a_consequence(error: Exception, expected: bool) -> None:
    assert is_consequence(error) is expected


def test_the_report_is_json_with_the_time_in_nanoseconds() -> None:
    data = json.loads(json.dumps(report_of(ValueError("x"), False, 5_000_000_001)))
    assert data["message"]["extraInfo"]["timestamp"] == "5"
    own = data["message"]["extraInfo"]["lockstep"]
    assert own == {"consequence": False, "time_ns": 5_000_000_001, "digest": own["digest"]}


UPLOADS = """
import atexit, pathlib, sys, time
from lockstep.runtime import install_excepthook
sys.modules[install_excepthook.__module__].TEARDOWN_LIMIT_S = 0.2
# Stands for an interpreter that hangs while it ends.
atexit.register(time.sleep, 300)
install_excepthook()

def upload():
    time.sleep(1.5)
    pathlib.Path(sys.argv[1]).write_text("uploaded")

atexit.register(upload)
raise ValueError("boom")
"""


def test_a_failed_process_runs_the_handlers_of_trackers_and_then_ends(
    tmp_path: Path, python_path: str
) -> None:
    command = [sys.executable, "-c", UPLOADS, str(tmp_path / "run")]
    environ = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "PYTHONPATH": python_path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("ValueError: boom")) == (1, 1)
    assert (tmp_path / "run").read_text() == "uploaded"
