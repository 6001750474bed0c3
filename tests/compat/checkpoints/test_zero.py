"""ZeRO's partitions, cut by the formulas of the format, become the parameters again; folders of variants are read."""

from __future__ import annotations

import math
import shutil
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.compat.checkpoints import (
    Scratch,
    join_stage_1_and_2,
    join_stage_3,
    read_foreign,
    spans_of_stage_1_and_2,
    spans_of_stage_3,
)
from lockstep.errors import CheckpointError
from tests.checkpoint_formats import source
from tests.marks import examples
from tests.refusals import expect_refusal

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)
worlds = st.integers(1, 5)


def parameters(of: list[tuple[int, ...]]) -> dict[str, Tensor]:
    count = 0
    found = {}
    for i, shape in enumerate(of):
        size = math.prod(shape)
        found[f"p{i}"] = torch.arange(count, count + size, dtype=torch.float32).view(shape)
        count += size
    return found


def cut_end_to_end(named: dict[str, Tensor], world: int, paddings: list[int], strip: bool) -> list[Tensor]:
    """Stages 1 and 2: all end to end, padded to a multiple of twice the ranks; ``strip`` the padding at the end."""
    pieces = [
        torch.cat([t.reshape(-1), torch.full((p,), -1.0)])
        for t, p in zip(named.values(), paddings, strict=True)
    ]
    flat = torch.cat(pieces)
    padding = -len(flat) % (2 * world)
    padded = torch.cat([flat, torch.full((padding,), -1.0)])
    parts = list(padded.chunk(world)) if len(padded) else [padded] * world
    return [part[: max(0, len(flat) - i * len(part))] for i, part in enumerate(parts)] if strip else parts


def cut_each(named: dict[str, Tensor], world: int) -> list[Tensor]:
    """Stage 3: each padded to a multiple of the ranks, cut, and a rank's parts end to end."""
    by_rank: list[list[Tensor]] = [[] for _ in range(world)]
    for value in named.values():
        padded = torch.cat([value.reshape(-1), torch.full((-value.numel() % world,), -1.0)])
        for rank, part in enumerate(padded.view(world, -1)):
            by_rank[rank].append(part)
    return [torch.cat(parts) for parts in by_rank]


@examples(200)
@given(shapes=shapes, world=worlds, strip=st.booleans(), data=st.data())
def test_stages_1_and_2_are_put_together(shapes: Any, world: int, strip: bool, data: st.DataObject) -> None:
    named = parameters(shapes)
    paddings = data.draw(st.lists(st.integers(0, 3), min_size=len(named), max_size=len(named)))
    by_rank = cut_end_to_end(named, world, paddings, strip)
    spans = spans_of_stage_1_and_2([{name: t.shape for name, t in named.items()}], [paddings])
    for span in spans:
        assert torch.equal(join_stage_1_and_2(span, by_rank, Scratch()), named[span.name])


@examples(200)
@given(shapes=shapes, world=worlds)
def test_stage_3_is_put_together(shapes: Any, world: int) -> None:
    named = parameters(shapes)
    by_rank = cut_each(named, world)
    spans = spans_of_stage_3([{name: t.shape for name, t in named.items()}], [len(by_rank[0])], world)
    for span in spans:
        assert torch.equal(join_stage_3(span, by_rank, Scratch()), named[span.name])


def test_a_vector_that_is_too_short_is_refused() -> None:
    named = parameters([(4,), (3,)])
    by_rank = cut_end_to_end(named, 2, [0, 0], strip=True)
    spans = spans_of_stage_1_and_2([{"p0": (4,), "p1": (9,)}])
    expect_refusal(ValueError, "p1 of shape (9,)", join_stage_1_and_2, spans[1], by_rank, Scratch())
    expect_refusal(ValueError, "6 elements", spans_of_stage_3, [{"p0": (4,), "p1": (8,)}], [4], 2)


def test_a_parameter_of_one_rank_is_not_copied() -> None:
    vectors = [torch.arange(4.0), torch.arange(4.0, 8.0)]
    spans = spans_of_stage_1_and_2([{"a": (3,), "b": (2,), "c": (3,)}])
    whole = [join_stage_1_and_2(span, vectors, Scratch()) for span in spans]
    assert [t.tolist() for t in whole] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert whole[0].data_ptr() == vectors[0].data_ptr() and whole[2].data_ptr() == vectors[1][1:].data_ptr()


def test_large_tensors_that_are_put_together_lie_in_a_file_that_is_gone(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = Scratch().empty((2**20,), torch.float32)
    place.fill_(3.0)
    assert place.sum() == 3.0 * 2**20 and list(tmp_path.iterdir()) == []
    assert str(tmp_path) in Path("/proc/self/maps").read_text()


# ------------------------------------------------------------------------------------ folders of variants


@pytest.fixture
def scaler_class() -> Iterator[type]:
    """A class under the name of DeepSpeed's, to be pickled."""
    name = "deepspeed.runtime.fp16.loss_scaler"
    parts = name.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {part: sys.modules.get(part) for part in names}
    for part in names:
        sys.modules[part] = types.ModuleType(part)
    made = type("DynamicLossScaler", (), {"__module__": name})
    sys.modules[name].DynamicLossScaler = made  # type: ignore[attr-defined]
    yield made
    for part, module in before.items():
        sys.modules.pop(part)
        if module is not None:
            sys.modules[part] = module


def write(
    folder: Path, elastic: bool = False, loss_scaler: Any = None, **more: Any
) -> tuple[dict[str, Tensor], ...]:
    """Stage 2 on two ranks with paddings between the parameters, by the description of the format."""
    named, moments = parameters([(3, 3), (5,), (2, 2)]), parameters([(3, 3), (5,), (2, 2)])
    moments = {name: value * 2 + 0.5 for name, value in moments.items()}
    paddings = [3, 1, 0]
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(folder.name)
    weights = cut_end_to_end(named, 2, paddings, strip=True)
    for rank in range(2):
        flat = cut_end_to_end(moments, 2, paddings, strip=elastic)[rank]
        group = {"lr": 0.1, "params": [0]}
        inner = {"state": {0: {"exp_avg": flat, "step": torch.tensor(7.0)}}, "param_groups": [group]}
        state = {
            "base_optimizer_state": [{"exp_avg": flat}] if elastic else inner,
            "single_partition_of_fp32_groups": [weights[rank]],
            "param_alignment_paddings": [paddings],
            "zero_stage": 2,
            "partition_count": [2],
            "loss_scaler": loss_scaler,
        } | ({"base_optimizer_state_step": 7} if elastic else {})
        torch.save(
            {"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )
    module = OrderedDict((name, value.half()) for name, value in named.items())
    common = {
        "module": module, "buffer_names": [], "param_shapes": [{name: t.shape for name, t in named.items()}],
        "shared_params": {}, "global_steps": 7, "lr_scheduler": None, "optimizer": None, "ds_config": {},
    }  # fmt: skip
    torch.save({**common, **more}, folder / "mp_rank_00_model_states.pt")
    return named, moments


@pytest.mark.parametrize("elastic", [False, True])
def test_paddings_between_parameters_are_left_out(elastic: bool, tmp_path: Path) -> None:
    named, moments = write(tmp_path / "step7", elastic)
    state = read_foreign(tmp_path)
    assert {name: t.tolist() for name, t in state.models[0].items()} == {
        name: t.tolist() for name, t in named.items()
    }
    states = state.optimizers[0]["state"]
    assert {name: values["exp_avg"].tolist() for name, values in states.items()} == {
        name: t.tolist() for name, t in moments.items()
    }
    (group,) = state.optimizers[0]["param_groups"]
    assert group["params"] == ["p0", "p1", "p2"]
    assert group.get("step") == 7 if elastic else all(values["step"] == 7 for values in states.values())


def test_weights_keep_their_fp32_values(tmp_path: Path) -> None:
    write(tmp_path / "step7")
    assert {t.dtype for t in read_foreign(tmp_path).models[0].values()} == {torch.float32}


def test_the_folder_of_a_tag_itself_is_read_too(tmp_path: Path) -> None:
    named, _ = write(tmp_path / "step7")
    assert read_foreign(tmp_path / "step7").models[0].keys() == named.keys()


@pytest.mark.parametrize(("iterations", "last_overflow"), [(0, -1), (3, -1), (9, 4), (12, 8), (5, 4)])
def test_a_dynamic_loss_scale_grows_when_deepspeeds_would_have(
    iterations: int, last_overflow: int, scaler_class: type, tmp_path: Path
) -> None:
    saved = scaler_class()
    window = 4
    saved.__dict__.update(
        cur_scale=256.0,
        cur_iter=iterations,
        last_overflow_iter=last_overflow,
        scale_factor=2.0,
        scale_window=window,
    )
    write(tmp_path / "step7", loss_scaler=saved)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(read_foreign(tmp_path).scaler)
    expected = 1
    # DeepSpeed's rule, in each step without overflow.
    while (iterations + expected - 1 - last_overflow) % window:
        expected += 1
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    steps = 0
    while scaler.get_scale() == 256.0:
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        steps += 1
    assert (steps, scaler.get_scale()) == (expected, 512.0)


def test_what_the_script_gave_along_is_kept_and_deepspeeds_own_is_not(tmp_path: Path) -> None:
    write(tmp_path / "step7", epoch=3, data_sampler={"x": 1})
    state = read_foreign(tmp_path)
    assert state.other == {"epoch": 3} and (state.step, state.world_size) == (7, 2)
    assert any("data_sampler" in note and "left out" in note for note in state.notes)


def test_without_zero_the_optimizer_is_plain(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 1}
    torch.save(saved, tmp_path / "mp_rank_00_model_states.pt")
    state = read_foreign(tmp_path)
    assert torch.equal(state.models[0]["weight"], model.weight)
    moment = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(state.optimizers[0]["state"][0]["momentum_buffer"], moment)


def test_a_flat_optimizer_without_names_is_refused(tmp_path: Path) -> None:
    saved = {"module": {"a": torch.ones(1)}, "optimizer": {"fp32_groups_flat": [torch.ones(1)]}}
    torch.save(saved, tmp_path / "mp_rank_00_model_states.pt")
    expect_refusal(CheckpointError, "no names", read_foreign, tmp_path)


def test_a_universal_form_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    shutil.copytree(source("universal-zero3"), tmp_path / "step7")
    (tmp_path / "latest_universal").write_text("step7")
    assert read_foreign(tmp_path).layout == "DeepSpeed's universal form"
    zero = tmp_path / "step7" / "zero"
    torch.save(torch.ones(2), zero / "up.weight" / "exp_avg.pt")
    expect_refusal(CheckpointError, "optimizer_state.pt", read_foreign, tmp_path)
    shutil.rmtree(zero / "up.weight")
    expect_refusal(CheckpointError, "fp32", read_foreign, tmp_path)
    (zero / "optimizer_state.pt").unlink()
    expect_refusal(CheckpointError, "optimizer_state.pt", read_foreign, tmp_path)


def test_a_divided_parameter_that_was_not_trained_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    shutil.copytree(source("universal-autotp"), tmp_path / "step")
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        (tmp_path / "step" / "zero" / name / f"{moment}.pt").unlink()
    expect_refusal(CheckpointError, name, read_foreign, tmp_path / "step")
