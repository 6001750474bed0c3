"""Equal blocks are traced once for a pipeline; what is traced is the same as if each of them were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm import leaves
from lockstep.model import find_blocks
from lockstep.parallel.pipeline import Layout, ModelCall, ModelTrace, Tracer, trace_every_block, trace_model

LAYERS = 24
NOTED: list[Tensor] = []


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.count, self.shared = number, 0, None
        self.kind = "plain"
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, notes: Any = None) -> Any:
        hidden = torch.relu(self.up(x))
        if self.kind == "number":
            hidden = hidden * (1 + self.number)
        if self.kind == "counts":
            self.count += 1
        if self.kind == "keeps":
            self.last = hidden
        if self.kind == "global":
            NOTED.append(hidden)
        if self.kind == "collects":
            notes.append(hidden.shape)
        if self.kind == "parameter":
            hidden = hidden + self.shared
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(map(Block, range(LAYERS)))
        self.scale = nn.Parameter(torch.ones(16))
        self.notes: list[Any] = []
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.notes)
            x += 1  # what a block returns is no leaf
        return self.head(x).square().mean()


@pytest.fixture
def traced_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    real = Tracer._called_for

    def counted(self: Tracer, module: Any, args: Any, kwargs: Any) -> Any:
        found.append(object.__getattribute__(module, "number"))  # which is not noted as read
        return real(self, module, args, kwargs)

    monkeypatch.setattr(Tracer, "_called_for", counted)
    NOTED.clear()
    return found


@pytest.fixture
def traced_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    real = Tracer._called_for
    monkeypatch.setattr(Tracer, "_called_for", lambda *given: found.append(0) or real(*given))
    return found


def traced(model: Model, replays: bool = True) -> ModelTrace:
    layout = Layout(model, find_blocks(model), [0, LAYERS // 2], torch.device("cpu"))
    call = ModelCall((torch.zeros(2, 3, dtype=torch.long),), {})
    if replays:
        return trace_model(model, layout, call, None)
    return trace_every_block(model, layout, call, None)


def shown(found: ModelTrace) -> Any:
    results = {name: list(map(str, leaves(one).values())) for name, one in found.results.items()}
    return found.cuts, found.stages, found.uses, found.shapes, found.early, results


def test_equal_blocks_are_traced_once(traced_blocks: list[int]) -> None:
    model = Model()
    found = traced(model)
    assert traced_blocks == [0]
    assert shown(found) == shown(traced(model, replays=False))
    assert len(traced_blocks) == 1 + LAYERS


def another_width(block: Block) -> None:
    block.up, block.down = nn.Linear(8, 24), nn.Linear(24, 8)


def another_activation(block: Block) -> None:
    block.up = nn.Sequential(block.up, nn.Tanh())


def hooked(block: Block) -> None:
    block.up.register_forward_hook(lambda *_: None)


def frozen(block: Block) -> None:
    block.requires_grad_(False)


@pytest.mark.parametrize(
    "change", [another_width, another_activation, hooked, frozen], ids=lambda f: f.__name__
)
def test_an_unequal_block_is_traced_by_itself(
    traced_blocks: list[int], change: Callable[[Block], None]
) -> None:
    model = Model()
    change(model.layers[7])
    found = traced(model)
    assert traced_blocks == [0, 7]
    assert shown(found) == shown(traced(model, replays=False))


@pytest.mark.parametrize("kind", ["number", "counts", "keeps", "global", "collects"])
def test_blocks_that_do_more_are_each_traced(traced_blocks: list[int], kind: str) -> None:
    model = Model()
    for layer in model.layers:
        layer.kind = kind
    found = traced(model)
    assert traced_blocks == list(range(LAYERS))
    assert shown(found) == shown(traced(model, replays=False))


def test_a_parameter_outside_of_blocks_is_seen_in_each(traced_blocks: list[int]) -> None:
    model = Model()
    for layer in model.layers:
        layer.kind, layer.shared = "parameter", model.scale
    found = traced(model)
    assert traced_blocks == list(range(LAYERS))
    assert found.uses["scale"] == {0, 1}


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_transformers(traced_calls: list[int], name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    config = getattr(transformers, name).config_class(**sizes)
    config.intermediate_size, config.use_cache = 16, False
    model = getattr(transformers, name)(config)
    layout = Layout(model, find_blocks(model), [0, LAYERS // 2], torch.device("cpu"))
    ids = torch.zeros(2, 3, dtype=torch.long)
    call = ModelCall((ids,), {"labels": ids})
    found = trace_model(model, layout, call, None)
    assert len(traced_calls) == 1
    every = trace_every_block(model, layout, call, None)
    assert len(traced_calls) == 1 + LAYERS
    assert (found.cuts, found.stages, found.uses) == (every.cuts, every.stages, every.uses)
    assert found.shapes == every.shapes


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_blocks_that_filled_a_cache_alike_are_traced_once_for_other_rows(
    traced_calls: list[int], name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    config = getattr(transformers, name).config_class(**sizes)
    config.intermediate_size = 16
    model = getattr(transformers, name)(config)
    layout = Layout(model, find_blocks(model), [0, LAYERS // 2], torch.device("cpu"))

    def call(rows: int) -> ModelCall:
        ids = torch.zeros(rows, 3, dtype=torch.long)
        return ModelCall((ids,), {"labels": ids})

    part = trace_model(model, layout, call(2), None)
    assert len(traced_calls) == LAYERS
    whole = trace_model(model, layout, call(6), None, part)
    assert len(traced_calls) == LAYERS + 1
    every = trace_every_block(model, layout, call(6), None)
    assert len(traced_calls) == 2 * LAYERS + 1
    assert (whole.cuts, whole.stages, whole.shapes) == (every.cuts, every.stages, every.shapes)
    assert str(leaves(whole.output)["['logits']"]) == str(leaves(every.output)["['logits']"])


class Caching(nn.Module):
    def __init__(self, number: int, reads: str) -> None:
        super().__init__()
        self.number, self.reads = number, reads
        self.keys = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        heads = self.keys(x).unsqueeze(1)
        keys, _ = cache.update(heads, heads, self.number)
        if self.reads == "number" and self.number % 2:
            keys = keys.relu()
        if self.reads == "neighbour" and self.number:
            keys = keys + cache.layers[self.number - 1].keys
        if self.reads == "collected":
            NOTED.append(keys.mean(-1))
        return x + keys.squeeze(1)


class CachingModel(nn.Module):
    def __init__(self, reads: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Caching(number, reads) for number in range(4))

    def forward(self, ids: Tensor) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        x = self.embed(ids)
        NOTED.clear()
        for layer in self.layers:
            x = layer(x, cache)
            x += 1  # what a block returns is no leaf
        return x, torch.stack(NOTED[-2:]) if NOTED else None


@pytest.mark.parametrize(("reads", "again"), [("", 1), ("number", 2), ("neighbour", 4), ("collected", 4)])
def test_only_blocks_that_do_the_same_on_their_own_are_taken_to_be_alike(
    traced_calls: list[int], reads: str, again: int
) -> None:
    pytest.importorskip("transformers")
    model = CachingModel(reads)
    stages = [0, 2] if reads != "neighbour" else [0]
    layout = Layout(model, find_blocks(model), stages, torch.device("cpu"))
    part = trace_model(model, layout, ModelCall((torch.zeros(2, 3, dtype=torch.long),), {}), None)
    call = ModelCall((torch.zeros(6, 3, dtype=torch.long),), {})
    assert len(traced_calls) == 4
    whole = trace_model(model, layout, call, None, part)
    assert len(traced_calls) == 4 + again
    assert shown(whole) == shown(trace_every_block(model, layout, call, None))
