"""What ``lockstep estimate`` counts, against models that are really built, and the cheapest way against all others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep import Accelerator
from lockstep.errors import CheckpointError, ConfigError, LockstepError, UsageError
from lockstep.model import find_blocks
from lockstep.offload.files import OffloadFile
from lockstep.offload.weights import find_weight_groups, stop_streaming, stream_weights
from lockstep.plan import (
    Limits,
    ModelFacts,
    carried_bytes,
    cheapest,
    facts_of,
    inference_rows,
    state_bytes,
    training_rows,
)
from lockstep.utils import Parallel
from parallel.blocks_and_root import BlocksAndRoot
from tests.refusals import expect_refusal

WIDTH, BLOCKS = 16, 6
TEXT = "parallel.blocks_and_root:BlocksAndRoot"
SIZES = {"width": WIDTH, "blocks": BLOCKS}
COMMON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": COMMON | {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 500},
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 500},
    "BertForMaskedLM": COMMON | {"model_type": "bert", "vocab_size": 500, "dtype": "bfloat16"},
}


def config(folder: Path, name: str, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({"architectures": [name]} | CONFIGS[name] | more))
    return path


def real(name: str) -> Any:
    """The model on the CPU, by transformers' own road."""
    data = CONFIGS[name] | {"architectures": [name]}
    made = transformers.AutoConfig.for_model(**data)
    return getattr(transformers, name)(made).to(getattr(torch, data.get("dtype", "float32")))


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


# -- counting a model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_has_the_counts_of_the_real_model(name: str, tmp_path: Path) -> None:
    model, facts = real(name), facts_of(str(config(tmp_path / "m", name)))
    assert replace(facts, name="") == replace(facts_of(str(tmp_path / "m")), name="")
    assert (facts.count, facts.trainable, facts.nbytes()) == (numel(model), numel(model), nbytes(model))
    assert facts.blocks == 3
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    assert facts.block == numel(layers[0])
    assert facts.root == numel(model) - sum(map(numel, layers))
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    others = nbytes(model) - sum(tensor.nbytes for tensor in tensors)
    assert facts.nbytes("float32") == sum(4 * tensor.numel() for tensor in tensors) + others


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_files_have_the_counts_of_what_was_saved(kind: str, tmp_path: Path) -> None:
    model = real("LlamaForCausalLM")
    if kind == "file":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    else:
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    facts = facts_of(str(tmp_path / "model.safetensors" if kind == "file" else tmp_path))
    assert (facts.kind, facts.count) == ("files of weights", numel(model))
    assert facts.nbytes() == sum(tensor.nbytes for tensor in model.state_dict().values())
    built = facts_of(str(config(tmp_path / "c", "LlamaForCausalLM")))
    assert (facts.blocks, facts.block, facts.root) == (built.blocks, built.block, built.root)
    assert facts.largest("float32")[1] == built.largest("float32")[1]


class Frozen(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight  # tied
        self.first.bias.requires_grad_(False)
        self.register_buffer("table", torch.zeros(5, dtype=torch.int64))


def test_tied_and_frozen_weights_and_buffers_are_told_apart() -> None:
    facts = facts_of(f"{__name__}:Frozen")
    assert (facts.count, facts.trainable, dict(facts.buffers)) == (64 + 16, 64 + 8, {"int64": 5})
    assert facts.nbytes("bfloat16") == 2 * 80 + 8 * 5
    assert facts_of(f"{__name__}:Frozen", {"width": 2}).count == 4 + 4


def test_counting_makes_no_weights(tmp_path: Path) -> None:
    huge = facts_of(str(config(tmp_path, "LlamaForCausalLM", hidden_size=2**20, num_hidden_layers=2)))
    assert huge.nbytes("float32") > 10**13


# -- running it ----------------------------------------------------------------------------------------


def test_what_a_streamed_model_needs() -> None:
    facts = facts_of(TEXT, SIZES)
    rows = {(row.dtype, row.placement): row for row in inference_rows(facts, Limits())}
    whole, block = nbytes(BlocksAndRoot(WIDTH, BLOCKS)), 4 * 2 * WIDTH * WIDTH
    full, ram, disk = (rows["float32", place] for place in ("whole", "from RAM", "from disk"))
    assert (full.device, full.host, full.disk, full.moved, full.fits) == (whole, 0, 0, 0, None)
    assert (ram.device, ram.host, ram.disk, ram.moved) == (4 * block, whole, 0, whole - block)
    assert (disk.device, disk.host, disk.disk, disk.moved) == (4 * block, 2 * block, whole, whole - block)
    assert rows["bfloat16, float16", "whole"].device == whole // 2
    with_room = inference_rows(facts, Limits(device=5 * block))
    assert [row.moved for row in with_room if row.dtype == "float32"] == [0, *[whole - 2 * block] * 2]
    assert [row.fits for row in with_room if row.dtype == "float32"] == [False, True, True]


def test_the_least_budget_is_what_the_streamer_takes_by_default(tmp_path: Path) -> None:
    width = 64  # whose weights are whole pages
    model = BlocksAndRoot(width, BLOCKS)
    file = OffloadFile(tmp_path, nbytes(model))
    for parameter in model.parameters():
        parameter.data = file.tensor(file.place(parameter.nbytes), parameter.shape, parameter.dtype)
    streamer = stream_weights(model, find_weight_groups(model, find_blocks(model)), torch.device("cpu"))
    budget = streamer.budget
    stop_streaming(model)
    rows = inference_rows(facts_of(TEXT, SIZES | {"width": width}), Limits())
    row = next(row for row in rows if row.placement == "from disk")
    assert row.device == budget


# -- training it ---------------------------------------------------------------------------------------

WAYS = ["ddp", "zero=1", "zero=3"]


def train(texts: list[str]) -> list[dict[str, int]]:
    """Bytes of weights, gradients and optimizer state on this rank after a step, tensor by tensor."""
    return [held(text) for text in texts]


def held(text: str) -> dict[str, int]:
    accelerator = Accelerator(cpu=True, parallel=text)
    model: Any = BlocksAndRoot(WIDTH, BLOCKS)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(2, WIDTH)).sum())
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values() if value.ndim]
    parts = {
        "weights": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer": state,
    }
    return {name: sum(map(local_bytes, tensors)) for name, tensors in parts.items()}


def local_bytes(tensor: Any) -> int:
    return int((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes)


def estimated(ranks: int) -> dict[str, dict[str, int]]:
    rows = training_rows(facts_of(TEXT, SIZES), [ranks], ["no"], "adamw", Limits())
    return {
        row.parallel: {name: getattr(row.state, name) for name in ("weights", "gradients", "optimizer")}
        for row in rows
    }


def test_two_ranks_hold_what_was_estimated(run_distributed: Any) -> None:
    rows = estimated(2)
    for counted in run_distributed(train, 2, WAYS):
        assert counted == [rows[text] for text in WAYS]


def test_one_process_holds_what_was_estimated() -> None:
    assert held("auto") == estimated(1)["auto"]


# 1000 parameters with AdamW in fp32: 4000 bytes of weights, 4000 of gradients, 8000 of state, 4000 of copies
CARRIED = {
    "auto": (0, 0),
    "offload=optimizer": (4000 + 4000, 0),
    "offload=optimizer offload_to=/d": (4000 + 4000, 2 * (8000 + 4000)),
    "offload": (2 * 4000 + 4000, 0),
    "offload=params offload_to=/d": (2 * 4000 + 4000, 2 * 4000 + 2 * 4000 + 2 * 4000),
    "offload offload_to=/d": (2 * 4000 + 4000, 2 * 4000 + 2 * 4000 + 2 * 4000 + 2 * 8000),
}


@pytest.mark.parametrize("text", CARRIED)
def test_bytes_to_the_host_and_to_the_disk(text: str) -> None:
    plan = Parallel.parse(text)
    assert carried_bytes(state_bytes(1000, 1, plan, "no"), plan) == CARRIED[text]


# -- what fits -----------------------------------------------------------------------------------------


def facts(layers: int, width: int, outside: int) -> ModelFacts:
    units = {f"layers.{i}": {"float32": width} for i in range(layers)} | {"head": {"float32": outside}}
    count = layers * width + outside
    return ModelFacts("m", "module", {"float32": count}, {}, count, layers, width, outside, units)


@given(
    st.integers(1, 40), st.integers(1, 10**9), st.integers(0, 10**9), st.sampled_from([1, 2, 8]),
    st.integers(1, 10**12), st.integers(1, 10**12), st.booleans(),
)  # fmt: skip
def test_the_cheapest_fits_and_nothing_that_fits_moves_less(
    layers: int, width: int, outside: int, ranks: int, memory: int, host: int, on_cpu: bool
) -> None:
    limits = Limits(memory, None if on_cpu else host, None, on_cpu=on_cpu)
    rows = training_rows(facts(layers, width, outside), [ranks], ["no", "bf16"], "adamw", limits)
    best = cheapest(rows)
    fitting = [
        row for row in rows
        if row.device * (ranks if on_cpu else 1) <= memory and (on_cpu or row.host * ranks <= host)
    ]  # fmt: skip
    assert [row for row in rows if row.fits] == fitting
    assert (best is None) == (not fitting)
    assert best is None or best.moved == min(row.moved for row in fitting)
    more = cheapest(
        training_rows(
            facts(layers, width, outside),
            [ranks],
            ["no", "bf16"],
            "adamw",
            Limits(2 * memory, limits.host, on_cpu=on_cpu),
        )
    )
    assert best is None or (more is not None and more.moved <= best.moved)


# -- activations ---------------------------------------------------------------------------------------


def kept_by_autograd(model: Any, run: Callable[[], Any]) -> int:
    """Bytes of the storages that autograd saves in a real forward, without the model's own."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_activations_are_those_that_autograd_keeps(name: str, tmp_path: Path) -> None:
    counted = facts_of(str(config(tmp_path, name)), None, 2, 24).activations
    assert counted is not None
    model, ids = real(name).train(), torch.zeros(2, 24, dtype=torch.long)

    def forward() -> Any:
        return model(input_ids=ids, labels=ids, use_cache=False)

    plain = kept_by_autograd(model, forward)
    # Counted without values, transformers makes the attention mask, and repeats the keys of grouped heads.
    assert 0.99 * plain <= counted["no"].none <= 1.1 * plain
    with torch.autocast("cpu", torch.bfloat16):
        half = kept_by_autograd(model, forward)
    assert 0.99 * half <= counted["bf16"].none <= 1.1 * half
    for block in find_blocks(model).values():
        block.forward = lambda *args, inner=block.forward, **kwargs: checkpoint(  # type: ignore[assignment]
            inner, *args, use_reentrant=False, **kwargs
        )
    outside = kept_by_autograd(model, forward)
    assert outside < counted["no"].full < plain
    assert counted["no"].offload <= counted["no"].full


# -- bad input -----------------------------------------------------------------------------------------

USER = """
import torch
def needs(depth, width=2): return torch.nn.Linear(depth, width)
def fails(): raise ValueError("no such size\\nmore")
def number(): return 3
def exits(): raise SystemExit(4)
def reads(): return torch.nn.Linear(int(torch.ones(()).item()), 1)
def lazy(): return torch.nn.LazyLinear(2)
def empty(): return torch.nn.ReLU()
model = torch.nn.Linear(2, 3)
"""


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("needs", {}, "missing 1 required positional argument: 'depth'"),
        ("needs", {"dpeth": 1}, "--args"),
        ("fails", {}, "ValueError: no such size (user.py:4)"),
        ("exits", {}, "SystemExit: 4"),
        ("number", {}, "gives a int, not a torch.nn.Module"),
        ("reads", {}, "built on the meta device"),
        ("lazy", {}, "lazy modules"),
        ("modle", {}, "Did you mean 'model'?"),
        ("model", {"width": 1}, "takes no arguments"),
        ("", {}, "is not a file, a folder"),
    ],
)
def test_a_factory_that_cannot_be_used_is_one_sentence(
    name: str, arguments: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "user.py").write_text(USER)
    message = expect_refusal(UsageError, "", facts_of, f"{tmp_path / 'user.py'}:{name}", arguments)
    assert sentence in message and "\n" not in message


def test_a_file_that_is_no_python_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("import torch\ndef f(:\n")
    expect_refusal(UsageError, "user.py:2", facts_of, f"{tmp_path / 'user.py'}:f")


def test_a_quantised_configuration_says_what_was_not_counted(tmp_path: Path) -> None:
    path = config(tmp_path, "LlamaForCausalLM", quantization_config={"quant_method": "fp8"})
    assert "quantised" in facts_of(str(path)).notes[0]


def test_an_object_and_a_function_with_arguments_are_counted(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    assert facts_of(f"{tmp_path / 'user.py'}:model").count == 9
    assert facts_of(f"{tmp_path / 'user.py'}:needs", {"depth": 5}).count == 12
    empty = facts_of(f"{tmp_path / 'user.py'}:empty")
    expect_refusal(ConfigError, "no parameters", training_rows, empty, [1], ["no"], "adamw", Limits())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("meta-llama/Llama-3", "is not a file, a folder"),
        ("no_such_module_q:Model", "No module named 'no_such_module_q'"),
        ("no/such/file.py:Model", "There is no file"),
        ("torch.nn:Linera", "Did you mean 'Linear'?"),
        ("\0", "is not a file, a folder"),
        ("a" * 5000, "is not a file, a folder"),
        (":", "is not a file, a folder"),
        (":Model", "is not a file, a folder"),
    ],
)
def test_what_is_not_there_is_refused(text: str, sentence: str) -> None:
    message = expect_refusal(UsageError, "", facts_of, text)
    assert sentence in message and "\n" not in message


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"model_type": "lama"}, "Did you mean 'llama'?"),
        ({"model_type": "new", "auto_map": {"AutoModel": "code.Model"}}, "code of its own"),
        ({"model_type": None}, "is not a model of transformers"),
        ({"hidden_size": 10**30}, "transformers cannot build this llama"),
        ({"hidden_size": -4}, "transformers cannot build this llama"),
        ({"hidden_size": "many"}, "transformers cannot build this llama"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused(
    more: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "code.py").write_text("raise SystemExit('was run')")
    path = config(tmp_path, "LlamaForCausalLM", **more)
    message = expect_refusal(LockstepError, "", facts_of, str(path))
    assert sentence in message and "\n" not in message


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(64)}, path)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], b"\xff" * 8 + whole[8:], whole.replace(b"[64]", b"[65]")):
        path.write_bytes(content)
        expect_refusal(CheckpointError, "model.safetensors", facts_of, str(path))


def test_a_folder_with_nothing_is_refused(tmp_path: Path) -> None:
    expect_refusal(UsageError, "config.json", facts_of, str(tmp_path))
    expect_refusal(UsageError, "input_ids", facts_of, TEXT, SIZES, 2, 8)
    expect_refusal(UsageError, "Drop them", facts_of, str(tmp_path), {"width": 1})
