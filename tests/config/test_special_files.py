"""A pipe, a folder or a device where a file of settings should be: one sentence, and no waiting for a writer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep import Accelerator
from lockstep.compat.accelerate import load
from lockstep.config import read_hostfile, read_json
from lockstep.errors import ConfigError
from tests.cli.calling import call

KINDS = {
    "pipe": "it is a pipe",
    "folder": "it is a folder",
    "/dev/zero": "it is a device",
    "link": "it is a pipe",
}
LAUNCH = ["launch", "--nproc", "1", "--cpu", "--dry-run", "--no-python", "true"]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("LOCKSTEP_CONFIG_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe", 0o600)
    os.mkdir("folder")
    os.symlink("pipe", "link")
    return tmp_path


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_plain_file_is_named_wherever_settings_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for read in (load, read_json, read_hostfile):
        with pytest.raises(ConfigError, match=KINDS[name]):
            read(name)
    for flag in ("--config-file", "--deepspeed-config-file", "--hostfile"):
        code, out, err = call(capsys, *LAUNCH[:1], flag, name, *LAUNCH[1:])
        assert (code, out) == (2, "") and KINDS[name] in err and err.count("lockstep: error: ") == 1
    for variable in ("LOCKSTEP_CONFIG_FILE", "LOCKSTEP_DEEPSPEED_CONFIG_FILE"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, name)
            code, out, err = call(capsys, *LAUNCH)
            assert (code, out) == (2, "") and KINDS[name] in err and variable in err
            with pytest.raises(ConfigError, match=f"{variable}.*{KINDS[name]}"):
                Accelerator(cpu=True)


@pytest.mark.parametrize("machines", [[], ["--nnodes", "2", "--rdzv", "127.0.0.1:29500"], ["--hosts", "a,b"]])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none", "No such file"),
        ("pipe", "is not a file"),
        ("folder", "is not a file"),
        ("short", "hexadecimal"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused_before_anything_is_shown(
    capsys: pytest.CaptureFixture[str], folder: Path, machines: list[str], name: str, why: str
) -> None:
    (folder / "short").write_text("abc\n")
    (folder / "short").chmod(0o600)
    code, out, err = call(capsys, "launch", "--secret-file", name, *machines, *LAUNCH[1:])
    assert (code, out) == (2, "") and name in err and why in err
