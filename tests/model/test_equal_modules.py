"""Equal modules are looked at once, and those that are not equal each by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.model import describe
from lockstep.parallel.tensor import TensorOptions, heads_of, infer_plan, make_plan
from tests.patching import module_of

LAYERS = 24


class Block(nn.Module):
    """``number`` tells the layers apart; a forward reads it only if ``reads``."""

    def __init__(self, number: int, width: int = 8, reads: bool = False, act: Any = torch.relu) -> None:
        super().__init__()
        self.number, self.reads, self.act, self.notes = number, reads, act, []
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.number if self.reads else 1
        return x + self.down(self.act(self.up(x)) * scale)


class Model(nn.Module):
    def __init__(self, **others: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(i, **(others if i == 5 else {})) for i in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Modules that tensor parallel rehearsed."""
    found: list[Any] = []
    for public, name in ((infer_plan, "run_rehearsal"), (heads_of, "first_that_passes")):
        module = module_of(public)
        real = getattr(module, name)

        def counted(rehearsal: Any, *rest: Any, _real: Any = real) -> Any:
            found.append(rehearsal.module)
            return _real(rehearsal, *rest)

        monkeypatch.setattr(module, name, counted)
    return found


@pytest.mark.parametrize(
    ("others", "count"),
    [({}, 1), ({"act": torch.tanh}, 2), ({"act": softmax}, 2), ({"reads": True}, 2)],
    ids=["equal", "another-function", "one-that-mixes", "one-that-reads-its-number"],
)
def test_equal_layers_are_rehearsed_once(rehearsals: list[Any], others: Any, count: int) -> None:
    plan = make_plan(Model(**others), 2, TensorOptions("infer"))
    assert len(rehearsals) == count
    mixes = others.get("act") is softmax
    styles = plan.styles
    assert [f"layers.{i}.up" in styles for i in range(LAYERS)] == [not mixes or i != 5 for i in range(LAYERS)]


@pytest.mark.parametrize("reads", [False, True])
def test_a_number_counts_where_it_is_read(rehearsals: list[Any], reads: bool) -> None:
    model = Model()
    for layer in model.layers:
        layer.reads = reads
    make_plan(model, 2, TensorOptions("infer"))
    assert len(rehearsals) == (LAYERS if reads else 1)


def test_attention_of_a_transformer_is_rehearsed_once(rehearsals: list[Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    plan = make_plan(model, 2, TensorOptions("infer"))
    assert len(plan.attention) == LAYERS
    kinds = [type(module).__name__ for module in rehearsals]
    assert sorted(kinds) == ["LlamaAttention", "LlamaMLP"]


def change_list(block: Block) -> None:
    block.notes.append(1)


def change_buffer(block: Block) -> None:
    block.bias[0] = 1


def freeze(block: Block) -> None:
    block.up.weight.requires_grad_(False)


def hook(block: Block) -> None:
    block.up.register_forward_hook(lambda *_: None)


def transpose(block: Block) -> None:
    block.up.weight = nn.Parameter(torch.zeros(32, 8).t().contiguous().t())


def close_over(block: Block) -> None:
    factor = 2
    block.act = lambda x: x * factor


def evaluate(block: Block) -> None:
    block.up.eval()


@pytest.mark.parametrize(
    "change",
    [change_list, change_buffer, freeze, hook, transpose, close_over, evaluate],
    ids=lambda f: f.__name__,
)
def test_what_makes_modules_unequal(change: Callable[[Block], None]) -> None:
    first, second = Block(0), Block(1)
    assert describe(first).structure == describe(second).structure
    change(second)
    assert describe(first).structure != describe(second).structure


def test_a_tensor_whose_memory_was_let_go_is_not_read() -> None:
    """To read it would end the process by a signal."""
    module: Any = nn.Linear(2, 2)
    module.gathered = [torch.ones(1000, 1000)]
    module.gathered[0].untyped_storage().resize_(0)
    assert describe(module).structure != describe(module).structure  # like no other, itself included
