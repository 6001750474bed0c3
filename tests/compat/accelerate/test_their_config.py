"""Each file that ``accelerate config`` writes is read as ``accelerate launch`` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.calling import call
from lockstep.compat import environment_settings
from lockstep.config import parallel_of
from lockstep.utils import Parallel
from tests.compat.accelerate.their_config import ANSWERS, launched, write

# Answers that accelerate launch itself loses between its file and its workers: it tells them the default of its flag
# (FULL_SHARD), or nothing (the folder). Here the file counts.
LOST = {
    "FSDP 1, all answers": "zero=2 offload forward_prefetch activation=full blocks=BertLayer,GPTJBlock",
    "FSDP 1, replicas": "auto",
    "FSDP 1, two machines": "zero=3 replicate=2",
    "FSDP 1, two machines, ZeRO-2": "zero=2 replicate=2",
    "DeepSpeed, all in files": "zero=3 offload offload_to=FOLDER",
}
DYNAMO = {"backend": "no", "mode": "default", "use_fullgraph": "False", "use_dynamic": "False",
          "use_regional_compilation": "False"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    for name in ("LOCKSTEP_CONFIG_FILE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def dry_run(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The settings, and the environment of the workers, that ``lockstep launch`` reads from the file."""
    script = path.with_name("train.py")
    script.touch()
    code, out, err = call(capsys, "launch", "--config_file", path, "--dry-run", script)
    assert code == 0, err
    command, _, settings = out.partition("from the configuration:\n")
    assert " processes on this machine, each:" in command
    pairs = [line.strip().partition("=") for line in command.partition("environment:\n")[2].splitlines()]
    rows = [line[2:].partition(" ") for line in settings.splitlines()]
    return {name: rest.strip() for name, _, rest in rows}, {name: value for name, _, value in pairs}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_file_is_read_as_accelerate_reads_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "default_config.yaml"
    write(path, ANSWERS[name])
    settings, found = dry_run(capsys, path)
    args, environ = launched(path)
    assert settings["num_processes"].split()[0] == str(args.num_processes)
    assert settings["num_machines"].split()[0] == str(args.num_machines)
    assert settings["machine_rank"].split()[0] == str(args.machine_rank)
    assert settings.get("main_process_ip", "None").split()[0] == str(args.main_process_ip)
    assert settings["debug"].split()[0] == str(bool(args.debug))
    assert found.get("LOCKSTEP_USE_CPU", "false") == str(bool(args.use_cpu)).lower()
    assert found.get("LOCKSTEP_MIXED_PRECISION", "no") == environ["ACCELERATE_MIXED_PRECISION"]
    # of these two it never reads what the file says
    written = yaml.safe_load(path.read_text())
    assert settings["rdzv_backend"].split()[0] == written["rdzv_backend"]
    assert found.get("LOCKSTEP_CPU_AFFINITY") == str(written["enable_cpu_affinity"]).lower()
    assert found.get("CUDA_VISIBLE_DEVICES") == (None if args.gpu_ids == "all" else args.gpu_ids)
    for word, default in DYNAMO.items():
        # a run on DeepSpeed is told the backend alone
        theirs = environ.get(f"ACCELERATE_DYNAMO_{word.upper()}", getattr(args, f"dynamo_{word}"))
        ours = found.get(f"LOCKSTEP_DYNAMO_{word.upper()}", default)
        assert ours.lower() == str(theirs).lower(), word
    if name in LOST:
        assert found["LOCKSTEP_PARALLEL"] == LOST[name].replace("FOLDER", str(tmp_path))
    else:
        check_spread(args, environ, found)


def check_spread(args: Any, environ: dict[str, str], found: dict[str, str]) -> None:
    """How models are spread, against what Accelerate tells its workers of it."""
    said = environment_settings(environ, args.num_machines).settings
    theirs = parallel_of(said)
    ours = Parallel.parse(found.get("LOCKSTEP_PARALLEL"))
    sizes = {
        name: int(environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))
        for name in ("DP_REPLICATE", "TP", "CP")
    }
    if max(sizes.values()) > 1:
        assert (ours.replicate or 1, ours.tp or 1, ours.cp or 1) == tuple(sizes.values())
        assert (ours.zero, ours.blocks, ours.activation) == (theirs.zero, theirs.blocks, theirs.activation)
    else:
        assert str(ours) == str(theirs)
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        value = getattr(args, name)
        text = found.get(f"LOCKSTEP_{name.upper()}")
        assert text == (None if value is None else str(value)), name
