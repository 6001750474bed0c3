"""Folders that accelerate, torch and deepspeed wrote become exactly what their live objects held.

What they held was recorded from the objects, never from the files, by ``fixtures/generate.py``, which needs DeepSpeed.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.checkpoint.format import decode, encode
from lockstep.checkpoint.weights import open_weights
from lockstep.compat.checkpoints import ImportedState, describe_state, read_foreign, write_imported
from lockstep.errors import CheckpointError, UsageError
from lockstep.runtime import rng_state, set_rng_state
from tests.checkpoint_formats import CONVERTED, FIXTURES, FORMATS, converted, source
from tests.refusals import expect_refusal

RECORDED = sorted(path.name for path in FIXTURES.iterdir() if (path / "expected.json").exists())
CASES = [case for case in RECORDED if case not in (*CONVERTED, "autotp")]
WEIGHTS_ONLY = ["legacy", "megatron", "sharded", "weights"]
WITHOUT_OPTIMIZER = [*WEIGHTS_ONLY, "universal-autotp"]


@functools.cache
def read(case: str) -> tuple[ImportedState, dict[str, Tensor], dict[str, Any]]:
    expected = json.loads((FIXTURES / case / "expected.json").read_text())
    return read_foreign(source(case)), load_file(FIXTURES / case / "expected.safetensors"), expected


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


def named_states(optimizer: dict[str, Any], names: list[str] | None) -> dict[str, dict[str, Any]]:
    """The states by name; numbers are looked up in ``names``."""
    return {key if isinstance(key, str) else names[key]: value for key, value in optimizer["state"].items()}


def test_each_recorded_checkpoint_is_in_the_table_of_the_docs() -> None:
    assert sorted(FORMATS) == RECORDED


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_the_live_model(case: str) -> None:
    state, tensors, _ = read(case)
    expected = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    if case == "accelerate":  # safetensors has a tied weight once
        del expected["again.weight"]
    assert state.models[0].keys() == expected.keys()
    wrong = [name for name, tensor in expected.items() if not same(state.models[0][name], tensor)]
    assert wrong == []


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITHOUT_OPTIMIZER])
def test_the_optimizer_is_that_of_the_live_one(case: str) -> None:
    state, tensors, expected = read(case)
    wanted = {
        name.removeprefix("optimizer/"): t for name, t in tensors.items() if name.startswith("optimizer/")
    }
    numbered = [name for group in expected.get("names", []) for name in group]
    found = {
        f"{name}/{key}": value
        for name, values in named_states(state.optimizers[0], numbered).items()
        for key, value in values.items()
    }
    if "adam_step" in expected:  # DeepSpeed has no function for the step
        steps = [float(value) for name, value in found.items() if name.endswith("/step")]
        assert steps == [expected["adam_step"]] * len(steps)
        found = {name: value for name, value in found.items() if not name.endswith("/step")}
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not same(torch.as_tensor(found[name]), tensor)] == []


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITHOUT_OPTIMIZER])
def test_the_groups_are_those_of_the_live_optimizer(case: str) -> None:
    state, _, expected = read(case)
    groups = json.loads(json.dumps(state.optimizers[0]["param_groups"]))
    if "stage" in expected:
        assert [sorted(g["params"]) for g in groups] == [
            sorted(g["params"]) for g in expected["param_groups"]
        ]
        assert [g["weight_decay"] for g in groups] == [g["weight_decay"] for g in expected["param_groups"]]
        assert [g["lr"] for g in groups] == expected["lr"]
    else:
        assert groups == expected["param_groups"]


@pytest.mark.parametrize("case", CASES)
def test_the_rest_is_what_was_there(case: str) -> None:
    state, _, expected = read(case)
    assert [entry["last_epoch"] for entry in state.schedulers] == (
        [expected["last_epoch"]] if "last_epoch" in expected else []
    )
    if "milestones" in expected:
        assert state.schedulers[0]["milestones"] == {2: 1, 5: 1}
        assert state.other == {"epoch": 3, "best": float("inf")}
    if "stage" in expected:
        assert state.step == expected["adam_step"] and state.world_size == 2
    if "scale" in expected:
        assert (state.scaler or {}).get("scale") == expected["scale"]


@pytest.mark.parametrize("case", ["accelerate", "accelerate-zero3"])
def test_the_generators_draw_on_as_they_would_have(case: str) -> None:
    state, _, expected = read(case)
    before = rng_state()
    try:
        set_rng_state(state.rng[0])
        numpy = [float(np.random.rand()), float(np.random.randn())]
        drawn = [random.random(), random.gauss(0, 1)]
        assert [*drawn, *numpy, float(torch.rand(()))] == [*expected["draws"][:2], *expected["draws"][2:]]
    finally:
        set_rng_state(before)


@pytest.mark.parametrize("case", ["accelerate", "accelerate-bin"])
def test_further_models_optimizers_and_objects_are_read(case: str) -> None:
    state, _, expected = read(case)
    assert {name: value.tolist() for name, value in state.models[1].items()} == expected["second"]
    moments = [values["momentum_buffer"].tolist() for values in state.optimizers[1]["state"].values()]
    assert moments == expected["momentum"]
    (counter,) = state.objects
    assert counter["tokens"] == expected["tokens"] and counter["losses"] == [0.5, float("inf")]
    assert counter["mean"].tolist() == expected["mean"]


def test_a_stateful_loaders_position_is_said_to_be_left_out() -> None:
    state, _, _ = read("accelerate-bin")
    assert any("dl_state_dict.bin" in note and "left out" in note for note in state.notes)


@pytest.mark.parametrize("case", CASES)
def test_each_state_fits_into_json_and_tensors(case: str) -> None:
    state, _, _ = read(case)
    parts = [state.optimizers, state.schedulers, state.scaler, state.objects, state.rng, state.other]
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(parts, tensors, "state"), allow_nan=False)
    assert repr(decode(json.loads(text), tensors)) == repr(parts)


@pytest.mark.parametrize("case", WEIGHTS_ONLY)
def test_weights_alone_are_written_as_safetensors(case: str, tmp_path: Path) -> None:
    state, tensors, _ = read(case)
    assert state.weights_only
    write_imported(state, str(tmp_path / "out"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    tied = {"again.weight"}  # one tensor under two names is written once
    assert {f"model/{name}" for name in written} == tensors.keys() - {f"model/{name}" for name in tied}
    assert all(same(tensor, tensors[f"model/{name}"]) for name, tensor in written.items())


def test_a_part_can_be_left_out_and_is_named() -> None:
    state = read_foreign(source("accelerate"), skip=["custom_checkpoint_0.pkl", "optimizer_1.bin"])
    assert state.objects == [] and len(state.optimizers) == 1
    assert "custom_checkpoint_0.pkl: left out, because skip names it" in state.notes


def test_what_is_to_be_left_out_must_be_there() -> None:
    with pytest.raises(UsageError, match=r"custom_checkpoint_7\.pkl"):
        read_foreign(source("accelerate"), skip=["custom_checkpoint_7.pkl"])


def test_a_table_names_each_part_with_its_size() -> None:
    state, _, _ = read("accelerate-bin")
    rows = describe_state(state)
    assert ("model", "0", "9 tensors (8 float32, 1 int64), 292 bytes") in rows
    assert ("optimizer", "0", "5 numbered parameters in 2 groups, 15 tensors (15 float32), 380 bytes") in rows
    assert ("loss scale", "", "scale 512.0") in rows
    assert [row[2] for row in rows if row[0] == "note"] == state.notes


def test_whole_tensors_are_mapped_not_copied() -> None:
    """A tensor shares its bytes with the others of its storage, so nothing was read into memory of its own."""
    state, _, _ = read("weights")
    tied = state.models[0]["down.weight"], state.models[0]["again.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    assert state.models[0]["half"].stride() == (1, 4)


@pytest.mark.parametrize("case", ["dcp-safetensors", "dcp-safetensors-joined"])
def test_dcps_safetensors_are_converted_to_whole_weights(case: str, tmp_path: Path) -> None:
    written = load_file(converted(case, tmp_path))
    expected = load_file(FIXTURES / case / "expected.safetensors")
    assert {f"model/{name}" for name in written} == expected.keys()
    assert all(same(tensor, expected[f"model/{name}"]) for name, tensor in written.items())


def test_dcps_safetensors_that_all_ranks_wrote_to_one_file_are_refused(tmp_path: Path) -> None:
    expect_refusal(CheckpointError, "save_distributed=True", converted, "dcp-safetensors-default", tmp_path)


def test_it_does_not_matter_which_rank_wrote_last(tmp_path: Path) -> None:
    """The other rank has no buffers, as these are saved once: its file lacks what the index names."""
    folder = shutil.copytree(source("dcp-safetensors-default"), tmp_path / "in")
    shard = source("dcp-safetensors") / "shard-00002-model-00001-of-00001.safetensors"
    shutil.copy(shard, folder / "model-00001-of-00001.safetensors")
    expect_refusal(CheckpointError, "save_distributed=True", open_weights, str(folder))


def test_shards_of_dcps_safetensors_must_all_be_there(tmp_path: Path) -> None:
    for file in source("dcp-safetensors").iterdir():
        if file.name.startswith("shard-00002"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    expect_refusal(CheckpointError, "pieces of up.bias", open_weights, str(tmp_path))


def test_dcps_safetensors_are_no_pickles() -> None:
    expect_refusal(CheckpointError, "checkpoint convert", read_foreign, source("dcp-safetensors"))


def test_a_model_that_deepspeed_divided_is_refused_until_it_is_joined() -> None:
    expect_refusal(CheckpointError, "ds_to_universal.py", read_foreign, source("autotp"))
