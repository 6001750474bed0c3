"""``lockstep checkpoint``: what people see, and the exit codes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cli import calling
from lockstep import Accelerator, ProjectConfiguration
from lockstep.compat.checkpoints import write_imported
from tests.patching import module_of

COMMANDS = ("verify", "show", "merge", "convert", "import-pickle")


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code, out, err = calling.call(capsys, "checkpoint", *arguments)
    assert "Traceback" not in err
    return code, out, err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with three checkpoints of a model of 6 x 3 + 3 elements: after 1, 2 and 3 steps of SGD."""
    project = tmp_path_factory.mktemp("project")
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(str(project), automatic_checkpoint_naming=True)
    )
    prepared, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    for step in range(3):
        accelerator.backward(prepared(torch.ones(2, 6)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
        save_file(model.state_dict(), project / f"expected_{step}.safetensors")
    accelerator.end_training()
    return project


@pytest.fixture
def project(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for path in saved.rglob("*"):
        if path.is_file():
            target = tmp_path / "project" / path.relative_to(saved)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "project"


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def newest(project: Path) -> Path:
    return project / "checkpoints" / "checkpoint_2"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_start_with_the_command(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = call(capsys, name, "--help")
    assert code == 0
    examples = [line.strip() for line in out.partition("Examples:\n")[2].splitlines() if line.strip()]
    assert len(examples) >= 3
    assert all(line.startswith(f"lockstep checkpoint {name} ") for line in examples)


def test_verify_lists_the_files_of_a_whole_checkpoint(
    capsys: pytest.CaptureFixture[str], saved: Path
) -> None:
    code, out, err = call(capsys, "verify", newest(saved))
    assert (code, err) == (0, "")
    files = [path for path in newest(saved).iterdir() if path.name != "manifest.json"]
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines()[1:-1]}
    assert rows == {path.name: f"{path.stat().st_size:,}" for path in files}
    assert f"OK, {len(files)} files of {sum(path.stat().st_size for path in files):,} bytes" in out


def test_verify_names_what_is_damaged(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    damage(newest(project) / "model-00000.safetensors")
    code, out, err = call(capsys, "verify", newest(project))
    assert code == 1
    assert "OK" not in out
    assert "model-00000.safetensors is damaged" in err
    assert "model.0.bias" in err
    assert "model.0.weight" in err
    (newest(project) / "state.json").unlink()
    assert "lacks state.json" in call(capsys, "verify", newest(project))[2]


def test_of_a_folder_verify_says_which_one_a_resumed_run_would_load(
    capsys: pytest.CaptureFixture[str], project: Path
) -> None:
    places = [str(project / "checkpoints" / f"checkpoint_{i}") for i in range(3)]
    code, out, _ = call(capsys, "verify", project / "checkpoints")
    assert code == 0
    assert f"{places[2]}: OK" in out
    assert places[1] not in out
    assert out.endswith(f"A resumed run would load {places[2]}.\n")

    damage(Path(places[2]) / "model-00000.safetensors")
    code, out, err = call(capsys, "verify", project)
    assert code == 1
    assert places[2] in err
    assert places[0] not in out
    assert out.endswith(f"A resumed run would load {places[1]}.\n")

    code, out, _ = call(capsys, "verify", project, "--all")
    assert code == 1
    assert f"{places[0]}: OK" in out

    for place in places[:2]:
        damage(Path(place) / "state.json")
    code, out, err = call(capsys, "verify", project)
    assert code == 1
    assert err.count("is damaged") == 3
    assert out == "A resumed run would find none to load.\n"


def test_what_verify_says_is_what_a_resumed_run_does(
    capsys: pytest.CaptureFixture[str], project: Path
) -> None:
    damage(newest(project) / "tensors.json")
    said = call(capsys, "verify", project)[1].rstrip(".\n").split()[-1]
    model = nn.Linear(6, 3)
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(str(project), automatic_checkpoint_naming=True)
    )
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert accelerator.load_state() == said
    accelerator.end_training()


@pytest.mark.parametrize("name", ["verify", "show"])
def test_where_nothing_is_there_is_an_error_without_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    for place in (tmp_path, tmp_path / "none"):
        code, _, err = call(capsys, name, place)
        assert code == 2
        assert f"lockstep: error: There is no checkpoint at {place}" in err
        assert err.count("\n") == 1


def test_show_has_step_and_epoch_and_imports_no_torch(saved: Path) -> None:
    program = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
    program += "from lockstep.cli import run_lockstep; run_lockstep()"
    command = [sys.executable, "-c", program, "checkpoint", "show", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    titles, newest_one, *_, imported = done.stdout.splitlines()
    assert titles.split()[:4] == ["checkpoint", "saved", "step", "epoch"] and imported == "False"
    assert newest_one.split()[2] == "3"  # optimizer steps


def test_show_tells_who_saved_what(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    code, out, _ = call(capsys, "show", newest(saved), "--json", "--tensors")
    assert code == 0
    facts = json.loads(out)
    assert facts["saved"]["world_size"] == 1
    assert facts["saved"]["versions"]["torch"] == torch.__version__
    assert facts["saved"]["settings"]["gradient_accumulation_steps"] == 1
    assert facts["contents"]["model"] == facts["contents"]["optimizer"] == 1
    elements = 6 * 3 + 3
    for group in ("model.0", "optimizer.0"):  # momentum has the elements of the parameters
        assert facts["groups"][group] == {
            "tensors": 2,
            "elements": elements,
            "bytes": 4 * elements,
            "bytes_by_dtype": {"F32": 4 * elements},
        }
    sizes = {
        path.name: path.stat().st_size for path in newest(saved).iterdir() if path.name != "manifest.json"
    }
    assert {name: file["size"] for name, file in facts["files"].items()} == sizes
    assert facts["bytes"] == sum(sizes.values())
    assert facts["tensors"]["model.0.weight"]["shape"] == [3, 6]

    code, out, _ = call(capsys, "show", newest(saved), "--tensors")
    lines = [line.split() for line in out.splitlines()]
    assert ["model.0", "2", "21", "84", "F32", "84"] in lines
    assert ["model.0.weight", "F32", "[3,", "6]", "1", "model-00000.safetensors"] in lines
    assert ["torch", torch.__version__] in lines
    assert "model.0.weight" not in call(capsys, "show", newest(saved))[1]


def test_show_has_a_line_for_each_of_a_folder(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    damage(project / "checkpoints" / "checkpoint_1" / "manifest.json")
    code, out, err = call(capsys, "show", project)
    assert code == 0
    names = [Path(line.split()[0]).name for line in out.splitlines()[1:]]
    assert names == ["checkpoint_2", "checkpoint_1", "checkpoint_0"]
    assert "damaged" in out.splitlines()[2]
    assert "checkpoint_1/manifest.json is " in err
    facts = json.loads(call(capsys, "show", project, "--json")[1])
    assert [("error" in fact) for fact in facts] == [False, True, False]


def test_names_cannot_send_control_characters_to_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True)
    module = nn.Module()
    module._parameters["red\x1b[31m"] = nn.Parameter(torch.ones(2))
    accelerator.prepare(module)
    accelerator.save_state(tmp_path / "checkpoint")
    accelerator.end_training()
    _, out, _ = call(capsys, "show", tmp_path / "checkpoint", "--tensors")
    assert "model.0.red?[31m" in out
    assert "\x1b" not in out


def test_merge_writes_the_weights_of_a_checkpoint(
    capsys: pytest.CaptureFixture[str], saved: Path, tmp_path: Path
) -> None:
    out_file = tmp_path / "out.safetensors"
    code, out, _ = call(capsys, "merge", newest(saved), out_file)
    assert (code, out) == (0, f"Wrote {out_file}: 2 tensors of 84 bytes.\n")
    found, expected = load_file(out_file), load_file(saved / "expected_2.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    digest = hashlib.sha256(out_file.read_bytes()).hexdigest()

    code, _, err = call(capsys, "merge", newest(saved).parent / "checkpoint_0", out_file)
    assert code == 2
    assert (
        err
        == f"lockstep: error: {out_file} exists and was left as it is. Use --force, or name another file.\n"
    )
    assert hashlib.sha256(out_file.read_bytes()).hexdigest() == digest
    assert call(capsys, "merge", newest(saved).parent / "checkpoint_0", out_file, "--force")[0] == 0
    found, expected = load_file(out_file), load_file(saved / "expected_0.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_nothing_is_merged_from_a_damaged_checkpoint(
    capsys: pytest.CaptureFixture[str], project: Path, tmp_path: Path
) -> None:
    damage(newest(project) / "model-00000.safetensors")
    code, _, err = call(capsys, "merge", newest(project), tmp_path / "out.safetensors")
    assert code == 2
    assert "model-00000.safetensors is damaged" in err
    assert not (tmp_path / "out.safetensors").exists()


def test_convert_writes_shards_in_another_dtype(
    capsys: pytest.CaptureFixture[str], saved: Path, tmp_path: Path
) -> None:
    arguments = ["--to", "weights", "--dtype", "bf16", "--max-shard-size", "40"]
    code, out, _ = call(capsys, "convert", newest(saved), tmp_path / "out", *arguments)
    assert code == 0
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert f"Wrote 2 tensors of 42 bytes to {tmp_path}/out: {', '.join(names)}, " in out
    found = {**load_file(tmp_path / "out" / names[0]), **load_file(tmp_path / "out" / names[1])}
    expected = load_file(saved / "expected_2.safetensors")
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in expected.items())
    assert "has weights, which were left" in call(capsys, "convert", newest(saved), tmp_path / "out")[2]
    assert call(capsys, "convert", newest(saved), tmp_path / "out", "--force")[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]
    assert (
        "max_shard_size='x' is not a size"
        in call(capsys, "convert", newest(saved), tmp_path / "a", "--max-shard-size", "x")[2]
    )


def test_what_the_system_refuses_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    save_file({"a": torch.ones(1)}, tmp_path / "in.safetensors")
    code, _, err = call(capsys, "merge", tmp_path / "in.safetensors", tmp_path / "file" / "out.safetensors")
    assert code != 0
    assert "could not be written" in err
    assert err.count("\n") == 1


def test_import_pickle_prints_what_each_part_became_and_writes_a_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "old"
    source.mkdir()
    torch.save({"weight": torch.ones(2, 3)}, source / "pytorch_model.bin")
    (source / "notes.pt").write_bytes(b"no pickle")
    written: list[Any] = []
    monkeypatch.setattr(
        module_of(write_imported),
        "write_imported",
        lambda state, out: written.append((state, os.fspath(out))),
    )
    code, out, _ = call(capsys, "import-pickle", source, tmp_path / "new", "--skip", "notes.pt")
    assert code == 0
    ((state, place),) = written
    assert place == str(tmp_path / "new")
    assert torch.equal(state.models[0]["weight"], torch.ones(2, 3))
    assert "1 tensors (1 float32), 24 bytes" in out
    assert "notes.pt: left out, because skip names it" in out
    assert f"Wrote {tmp_path}/new: weights, as save_model writes them." in out
    code, _, err = call(capsys, "import-pickle", tmp_path / "none", tmp_path / "new")
    assert code == 2
    assert err.startswith("lockstep: error: ")
