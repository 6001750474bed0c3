"""Processes of a script: their end, and what they left."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from lockstep.script import ScriptProcess, of_script, run_script

HANGS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def process(tmp_path: Path, code: str, timeout_s: float = 100.0) -> ScriptProcess:
    return ScriptProcess(["-c", code], tmp_path / "output.txt", {}, timeout_s)


def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    started = process(tmp_path, HANGS, timeout_s=0.0)
    while not started.output().endswith("\n"):
        time.sleep(0.01)
    pid = int(started.output())
    os.kill(pid, 0)
    assert started.wait() is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_exit_code_and_the_end_of_the_output_are_known(tmp_path: Path) -> None:
    started = process(tmp_path, "for i in range(30): print('line', i)\nraise MemoryError")
    assert started.wait() == 1
    assert started.ran_out_of_memory(1)
    assert started.tail().endswith("MemoryError") and "line 0" not in started.tail()
    assert started.how_it_failed(1) == "exit code 1."
    started.end()


def test_a_sentence_of_this_library_is_said_again(tmp_path: Path) -> None:
    started = process(tmp_path, "from lockstep.errors import ConfigError\nraise ConfigError('Two, not one.')")
    assert started.wait() == 1
    assert started.how_it_failed(1) == "Two, not one."
    assert not started.ran_out_of_memory(1)


def test_a_script_has_its_arguments_and_its_own_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fails.py"
    path.write_text("import sys\ndef fail():\n    raise ValueError(sys.argv[1:])\nfail()\n")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match=r"\['a', 'b'\]") as caught:
        run_script([str(path), "a", "b"], is_module=False)
    own = of_script(caught.value.__traceback__)
    assert own is not None and own.tb_frame.f_code.co_filename == str(path)
    assert own.tb_frame.f_code.co_name == "<module>"
    with pytest.raises(FileNotFoundError) as missing:
        run_script([str(tmp_path / "none.py")], is_module=False)
    assert of_script(missing.value.__traceback__) is missing.value.__traceback__
