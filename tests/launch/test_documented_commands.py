"""Every ``lockstep launch`` in the documentation becomes a plan, and shows what it would run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lockstep.cli import run_lockstep

DOCS = Path(__file__).parents[2] / "docs"
BASH = re.compile(r"^```bash\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
TWO_MACHINES = "num_machines: 2\nnum_processes: 16\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n"


def commands(name: str) -> list[list[str]]:
    text = "".join(BASH.findall((DOCS / name).read_text(encoding="utf-8"))).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words[1:] for words in lines if words[:2] == ["lockstep", "launch"]]


PAGES = sorted(page.name for page in DOCS.glob("*.md") if commands(page.name))


@pytest.mark.parametrize("page", PAGES)
def test_every_launch_of_a_page_has_a_dry_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("HF_HOME", "/folder")
    monkeypatch.setenv("HF_TOKEN", "canary-of-the-docs")
    (tmp_path / "train.py").touch()
    (tmp_path / "hostfile").write_text("host1 slots=8\nhost2 slots=8\n")
    (tmp_path / "run.yaml").write_text("num_processes: 2\nuse_cpu: true\n")
    (tmp_path / "two_machines.yaml").write_text(TWO_MACHINES)
    (tmp_path / "run.secret").write_text("ab" * 32 + "\n")
    (tmp_path / "run.secret").chmod(0o600)
    for words in commands(page):
        with pytest.raises(SystemExit) as ended:
            run_lockstep(["launch", "--dry-run", *words[1:]])
        shown = capsys.readouterr()
        assert ended.value.code == 0, f"{words}\n{shown.err}"
        assert "train.py" in shown.out, words
        assert "canary-of-the-docs" not in shown.out + shown.err
