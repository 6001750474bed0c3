"""What ``--dry-run`` shows of files of other libraries: what they add up to, each with file and key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calling import call

DESCRIBED = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "tensor_parallel": {"autotp_size": 2},
}
FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 50},
    "gradient_accumulation_steps": 3,
    "zero_optimization": {"stage": 1},
}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(DESCRIBED))
    (tmp_path / "fp16.json").write_text(json.dumps(FP16))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """The rows of the table: name -> value and source."""
    code, out, err = call(capsys, "launch", *arguments, "--dry-run", "--no-python", "true")
    assert code == 0, err
    rows = out.partition("from the configuration:\n")[2].splitlines()
    return {row.split()[0]: " ".join(row.split()[1:]) for row in rows}


def test_a_deepspeed_file_is_shown_as_what_it_adds_up_to(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(
        capsys, "--nproc", "4", "--deepspeed-config-file", "ds.json", "--parallel", "activation=full"
    )
    assert rows["parallel"].startswith("zero=3 activation=full tp=2 ")
    for source in (
        "zero_optimization.stage=3 (ds.json)",
        "tensor_parallel.autotp_size=2 (ds.json)",
        "parallel='activation=full' (flag --parallel)",
    ):
        assert source in rows["parallel"]
    assert rows["mixed_precision"] == "bf16 bf16.enabled=True (ds.json)"
    assert rows["gradient_clipping"] == "0.5 gradient_clipping=0.5 (ds.json)"
    assert rows["micro_batch_size"] == "2 train_micro_batch_size_per_gpu=2 (ds.json)"
    assert rows["train_batch_size"] == "16 train_batch_size=16 (ds.json)"
    # 16 rows of a step = 2 rows x 4 micro-batches x 2 pairs of ranks
    assert rows["gradient_accumulation_steps"].startswith("4 follows from train_batch_size=16 (ds.json)")
    assert "'AdamW'" in rows["optimizer"] and "(ds.json)" in rows["optimizer"]


def test_the_scale_of_fp16_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, "--nproc", "2", "--deepspeed-config-file", "fp16.json")
    assert rows["mixed_precision"] == "fp16 fp16.enabled=True (fp16.json)"
    assert rows["gradient_accumulation_steps"] == "3 gradient_accumulation_steps=3 (fp16.json)"
    assert "'init_scale': 16.0" in rows["grad_scaler"] and "'growth_interval': 50" in rows["grad_scaler"]
    assert "fp16.initial_scale_power=4 (fp16.json)" in rows["grad_scaler"]
    assert rows["parallel"] == "zero=1 zero_optimization.stage=1 (fp16.json)"


def test_sections_of_fsdp_are_shown_key_by_key(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "run.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n"
        "  fsdp_activation_checkpointing: true\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"
    )
    rows = shown(capsys, "--config-file", "run.yaml")
    assert rows["parallel"] == (
        "zero=2 activation=full fsdp_sharding_strategy='SHARD_GRAD_OP' (run.yaml:3: fsdp_config); "
        "fsdp_activation_checkpointing=True (run.yaml:3: fsdp_config)"
    )


def test_variables_of_fsdp_are_shown_and_travel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    rows = shown(capsys, "--nproc", "2", "--parallel", "activation=full")
    assert rows["parallel"].startswith("zero=2 activation=full FSDP_SHARDING_STRATEGY='SHARD_GRAD_OP'")
    code, out, _ = call(
        capsys, "launch", "--hosts", "a,b", "--nproc", "2", "--dry-run", "--no-python", "true"
    )
    assert code == 0
    assert out.count("LOCKSTEP_PARALLEL") >= 1 and "zero=2" in out


def test_the_number_of_processes_of_a_layout_names_the_layout(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "run.yaml").write_text("parallelism_config:\n  tp_size: 2\n  dp_shard_size: 2\n")
    rows = shown(capsys, "--config-file", "run.yaml")
    assert rows["num_processes"] == (
        "4 dp_shard_size=2 (run.yaml:1: parallelism_config) x tp_size=2 (run.yaml:1: parallelism_config)"
    )
    assert rows["parallel"].startswith("zero=3 tp=2 dp_shard_size=2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch", "--dry-run", "--nproc", "3", "--parallel", "pp=2", "--no-python", "true"], "3 / 2 is not whole"),
        (["launch", "--nproc", "3", "--parallel", "pp=2", "--no-python", "true"], "3 / 2 is not whole"),
        (["launch", "--dry-run", "--parallel", " ", "--no-python", "true"], "--parallel"),
        (["launch", "--dry-run", "--config-file", "", "--no-python", "true"], "'' is not a path"),
        (["launch", "--dry-run", "--log-dir", "", "--no-python", "true"], "'' is not a path"),
        (["launch", "--dry-run", "--nproc", "1", "--log-dir", "ds.json/x", "--no-python", "true"], "ds.json is a file"),
        (["launch", "--dry-run", "--nproc", "1", "--no-python", ""], "'' is not the name of a script"),
        (["launch", "--dry-run", "--nproc", "1", "-m", " "], "' ' is not the name of a script"),
        (["config", "--num-processes", "3", "--parallel", "tp=2", "--config-file", "o.yaml"], "3 / 2 is not whole"),
        (["config", "--num-processes", "1", "--config-file", ""], "'' is not a path"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], message: str
) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err
    assert not (folder / "o.yaml").exists()
