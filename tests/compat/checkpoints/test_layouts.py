"""What a source is recognised as, by its names and content, and what is said of those that are not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from lockstep.compat.checkpoints import read_foreign, write_imported
from lockstep.errors import CheckpointError
from tests.refusals import expect_refusal

WEIGHTS = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize("key", ["model_state_dict", "state_dict", "model", "module", "model_state", "net"])
def test_weights_are_found_under_the_usual_keys(key: str, tmp_path: Path) -> None:
    state = read_foreign(saved(tmp_path / "x.ckpt", {key: WEIGHTS, "epoch": 2}))
    assert state.models[0].keys() == WEIGHTS.keys() and state.other == {"epoch": 2}


def test_several_optimizers_and_schedulers_are_read_from_lists(tmp_path: Path) -> None:
    optimizer = {"state": {}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    value = {
        "state_dict": WEIGHTS,
        "optimizer_states": [optimizer] * 2,
        "lr_schedulers": [{"last_epoch": 1}] * 2,
    }
    state = read_foreign(saved(tmp_path / "x.ckpt", value))
    assert state.optimizers == [optimizer] * 2 and state.schedulers == [{"last_epoch": 1}] * 2


def test_parameters_have_names_where_the_groups_say_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = read_foreign(saved(tmp_path / "x.pt", {"model": WEIGHTS, "optimizer": optimizer.state_dict()}))
    (group,) = state.optimizers[0]["param_groups"]
    assert group["params"] == ["weight", "bias"] and "param_names" not in group
    assert list(state.optimizers[0]["state"]) == ["weight", "bias"]


@pytest.mark.parametrize("written", ["torch.save", "torch.distributed.checkpoint"])
def test_a_flattened_optimizer_is_that_of_the_run(written: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, flat = get_state_dict(model, optimizer, options=options)
    value = {"model": weights, "optimizer": flat}
    if written == "torch.save":
        found = read_foreign(saved(tmp_path / "step.pt", value))
    else:
        dcp.save(value, checkpoint_id=tmp_path / "step", no_dist=True)
        found = read_foreign(tmp_path / "step")
    (read,) = found.optimizers
    rates = {frozenset(group["params"]): group["lr"] for group in read["param_groups"]}
    assert rates == {frozenset({"0.weight", "0.bias"}): 0.25, frozenset({"1.weight", "1.bias"}): 0.5}
    for name, parameter in model.named_parameters():
        for key, expected in optimizer.state[parameter].items():
            assert torch.equal(read["state"][name][key], expected)


def test_a_folder_with_one_pickled_file_is_that_file(tmp_path: Path) -> None:
    saved(tmp_path / "pytorch_model.bin", WEIGHTS)
    saved(tmp_path / "training_args.bin", {})
    (tmp_path / "config.json").write_text("{}")
    assert read_foreign(tmp_path).models[0].keys() == WEIGHTS.keys()


def test_the_link_that_a_user_names_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link.bin").symlink_to(saved(tmp_path / "x.bin", WEIGHTS))
    assert read_foreign(tmp_path / "link.bin").models[0].keys() == WEIGHTS.keys()


def test_files_that_are_no_part_of_the_format_are_named(tmp_path: Path) -> None:
    saved(tmp_path / "pytorch_model.bin", WEIGHTS)
    saved(tmp_path / "scheduler.bin", {"last_epoch": 1})
    (tmp_path / "extra.json").write_text("{}")
    assert "extra.json: left out, because it is no part of a training state" in read_foreign(tmp_path).notes


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 2], "it holds a list"),
        ({}, "a dict with nothing"),
        ({"weights": WEIGHTS}, r"a dict with 'weights' \(dict\)"),
        ({"state": {}, "param_groups": []}, r"'state' \(dict\), 'param_groups' \(list\)"),
        ({"model": {"a": 1}}, r"'model' \(dict\)"),
    ],
)
def test_a_dict_of_unknown_form_is_refused_with_what_was_seen(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_foreign(saved(tmp_path / "x.pt", value))


def test_unknown_sources_are_refused_with_what_was_seen(tmp_path: Path) -> None:
    expect_refusal(CheckpointError, "nothing", read_foreign, tmp_path / "nothing")
    (tmp_path / "model.onnx").write_bytes(b"x")
    expect_refusal(CheckpointError, "model.onnx", read_foreign, tmp_path)
    expect_refusal(CheckpointError, ".bin, .pt", read_foreign, tmp_path / "model.onnx")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    expect_refusal(CheckpointError, "safetensors file already", read_foreign, tmp_path / "model.safetensors")


def test_one_ranks_fsdp_shards_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "pytorch_model_fsdp_0_rank0.bin", WEIGHTS)
    saved(tmp_path / "scheduler.bin", {"last_epoch": 1})
    expect_refusal(CheckpointError, "one rank's shard", read_foreign, tmp_path)


def test_an_object_of_a_library_is_refused_by_its_place(tmp_path: Path) -> None:
    from torch.utils.data import TensorDataset

    saved(tmp_path / "pytorch_model.bin", WEIGHTS)
    saved(tmp_path / "custom_checkpoint_0.pkl", {"data": [TensorDataset(torch.ones(1))]})
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl\['data'\]\[0\].*TensorDataset"):
        read_foreign(tmp_path)


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_eight_bits_are_imported_as_they_are(name: str, tmp_path: Path) -> None:
    expected = torch.tensor([1.0, 2.0, 0.5]).to(getattr(torch, name))
    state = read_foreign(saved(tmp_path / "x.pt", {"scale": expected}))
    write_imported(state, str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "model.safetensors")["scale"]
    assert found.dtype is expected.dtype and found.float().tolist() == [1.0, 2.0, 0.5]


def test_lazy_conjugates_and_negatives_keep_their_signs(tmp_path: Path) -> None:
    values = torch.tensor([[1 + 2j, 3 - 4j], [5j, -6]], dtype=torch.complex64)
    weights = {
        "conjugate": values.conj(),
        "transposed": values.conj().t(),
        "double": values.to(torch.complex128).conj(),
        "imaginary": values.clone().conj().imag,
        "row": values.clone().conj().imag[1],
        "parameter": torch.nn.Parameter(values.conj()),
        "plain": values,
    }
    assert weights["conjugate"].is_conj() and weights["imaginary"].is_neg()
    path = saved(tmp_path / "old.pt", {"model": weights})
    expected, found = torch.load(path)["model"], read_foreign(path).models[0]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.tolist() == weights[name].tolist()
