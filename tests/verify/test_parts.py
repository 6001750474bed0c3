"""What the comparison is made of: no chance, no trace, tolerance, where a difference begins."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.parallel import WithoutChance
from lockstep.verify import (
    ComparedBatch,
    PassResult,
    Reference,
    RoundingLimits,
    Snapshot,
    SplitModelState,
    compare_with_whole,
    disturbed,
    numbers,
)

DRAWS: dict[str, Any] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout by position": lambda x: torch.dropout(x, 0.5, True),
    "dropout of channels": lambda x: F.dropout2d(x[None], training=True, p=0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "attention layer": lambda x: nn.MultiheadAttention(4, 2, dropout=0.5)(x, x, x)[0].detach() * 0,
    "lstm": lambda x: _recurrent(nn.LSTM, x),
    "packed gru": lambda x: _recurrent(nn.GRU, nn.utils.rnn.pack_sequence([x[0]])),
    "noise": lambda x: x + torch.randn_like(x) + torch.rand(x.shape) + torch.randn(x.shape),
    "drop path": lambda x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x[0].softmax(-1), 2).float(),
    "permutation": lambda x: x[torch.randperm(len(x))],
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "integers": lambda x: x + torch.randint(0, 5, (1,)) + torch.randint(9, (1,)),
    "in place": lambda x: x.clone().uniform_(1, 3) + x.clone().normal_(2, 0.5) + x.clone().random_(),
}


def _recurrent(kind: Any, x: Any) -> torch.Tensor:
    torch.manual_seed(3)
    layer = kind(4, 4, num_layers=2, dropout=0.5)
    torch.seed()
    output = layer(x)[0]
    return output.data if hasattr(output, "data") and not isinstance(output, torch.Tensor) else output


@pytest.mark.parametrize("name", DRAWS)
def test_nothing_is_left_to_chance(name: str) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4) / 24
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with WithoutChance():
            results.append(DRAWS[name](x))
    assert torch.equal(*results)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.calls, self.seen = 0, [1]
        self.last = torch.zeros(())
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.last = x.mean()
        self.cache = x
        if len(self.table) < len(x):
            self.table = torch.ones(len(x))
        return self.norm(self.layer(x))


def test_a_forward_is_undone() -> None:
    model = Counts()
    seen, table, state = model.seen, model.table, copy.deepcopy(model.state_dict())
    snapshot = Snapshot(model)
    expected = torch.rand(2)
    torch.manual_seed(0)
    model(torch.randn(4, 3))
    assert snapshot.changed_numbers() == {"calls": 1}
    snapshot.restore()
    assert model.calls == 0 and model.seen is seen and seen == [1] and not hasattr(model, "cache")
    assert model.last.item() == 0 and len(model.table) == 2 and torch.equal(model.table, table)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert numbers(model)["calls"] == 0 and torch.equal(torch.rand(2), expected)


def test_a_reference_takes_no_memory_before_it_is_filled_and_keeps_ties() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.LSTM(3, 3), nn.Linear(3, 5))
    model[2].weight = model[0].weight
    reference = Reference(model)
    assert all(p.is_meta for p in reference.model.parameters())
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    x = torch.tensor([[1, 2]])
    with reference.filled(weights, {"1.bias_hh_l0": False}, torch.device("cpu")) as whole:
        assert whole[2].weight is whole[0].weight and whole[1].bias_hh_l0.requires_grad is False
        assert torch.equal(whole[1](whole[0](x))[0], model[1](model[0](x))[0])
    assert all(p.is_meta for p in reference.model.parameters())


@pytest.mark.parametrize(
    ("dtype", "off", "is_seen"),
    [
        (torch.float32, 1e-2, True),
        (torch.float32, 1e-5, False),
        (torch.float64, 1e-5, True),
        (torch.bfloat16, 0.1, False),
        (torch.bfloat16, 0.5, True),
    ],
)
def test_rounding_is_allowed_and_no_more(dtype: torch.dtype, off: float, is_seen: bool) -> None:
    whole = PassResult(
        "", {"": torch.tensor(2.0)}, {"w": torch.ones(8, dtype=dtype), "b": torch.zeros(3, dtype=dtype)}
    )
    split = PassResult(
        "",
        {"": torch.tensor(2.0)},
        {"w": torch.ones(8, dtype=dtype) * (1 + off), "b": torch.zeros(3, dtype=dtype)},
    )
    assert bool(compare_with_whole(split, whole, [], [], RoundingLimits(whole, whole)).differences) is is_seen


def test_gradients_that_are_made_of_rounding_are_not_compared_by_their_size() -> None:
    whole = PassResult(
        "", {"": torch.tensor(2.0)}, {"w": torch.ones(8), "key.bias": torch.tensor([1e-9, -1e-9])}
    )
    split = PassResult(
        "", {"": torch.tensor(2.0)}, {"w": torch.ones(8), "key.bias": torch.tensor([-3e-9, 1e-9])}
    )
    assert compare_with_whole(split, whole, [], [], RoundingLimits(whole, whole)).differences == ()
    split.gradients["key.bias"] = torch.tensor([1e-3, 0.0])
    differences = compare_with_whole(split, whole, [], [], RoundingLimits(whole, whole)).differences
    assert [d.name for d in differences] == ["key.bias"]


@pytest.mark.parametrize("elements", [4, 4096])
def test_what_a_rounding_step_moves_is_allowed_by_a_multiple(elements: int) -> None:
    """An ill-conditioned model: its gradient moves by 1% of its norm; a tenth of the allowance is left to few."""
    gradient = torch.ones(elements)
    whole, moved = (PassResult(gradients={"w": gradient * size}) for size in (1.0, 1.01))
    allowed = 0.1 if elements > 1000 else 0.1 * (1 + 9 / elements)
    for off, is_seen in ((0.99 * allowed, False), (1.02 * allowed, True)):
        split = PassResult(gradients={"w": gradient * (1 + off)})
        found = compare_with_whole(split, whole, [], [], RoundingLimits(whole, moved)).differences
        assert bool(found) is is_seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_rounding_step_is_to_the_next_number_up_or_down(dtype: torch.dtype) -> None:
    values = torch.cat([torch.linspace(-3, 3, 1001), torch.tensor([0.0, math.inf, -math.inf])]).to(dtype)
    moved = disturbed(values)
    eps = torch.finfo(dtype).eps
    relative = ((moved - values) / values).double()[values.isfinite() & (values != 0)]
    assert relative.abs().max() <= eps * 1.01 and relative.abs().min() >= eps / 2 * 0.99
    assert 0.4 < (relative > 0).double().mean() < 0.6
    assert torch.equal(moved[-3:], values[-3:]) and torch.equal(moved, disturbed(values))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3),
        torch.empty(0, 2),
        torch.ones(2, 2).to(torch.float8_e4m3fn),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["integers", "empty", "8 bits", "sparse", "nested"],
)
def test_what_has_no_next_number_stays(tensor: torch.Tensor) -> None:
    assert disturbed(tensor) is tensor


class PullsOnItsInput(nn.Module):
    """A force field: its output is the gradient of an energy by the positions that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        energy = self.layer(positions).tanh().sum()
        return torch.autograd.grad(energy, positions, create_graph=True)[0].square().mean()


def test_a_disturbed_pass_has_inputs_that_require_gradients() -> None:
    model = PullsOnItsInput()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    live = SplitModelState(weights, dict.fromkeys(weights, True), {})
    batch = ComparedBatch((torch.randn(4, 3, requires_grad=True),), {})
    given = batch, live, torch.device("cpu"), lambda _: nullcontext()
    whole, moved = Reference(model).run(*given, False), Reference(model).run_disturbed(*given, None)
    limits = RoundingLimits(whole, moved)
    assert whole.gradients.keys() == limits.gradients.keys() == {"layer.weight", "layer.bias"}
    assert 0 < (moved.gradients["layer.weight"] - whole.gradients["layer.weight"]).norm() < 1e-5


@pytest.mark.parametrize(
    ("split", "whole", "is_seen"),
    [
        (2.0, 2.0, False),
        (2.1, 2.0, True),
        (math.nan, math.nan, False),
        (math.nan, 2.0, True),
        (2.0, math.nan, True),
        (math.inf, math.inf, False),
    ],
)
def test_numbers_that_modules_keep_are_compared(split: float, whole: float, is_seen: bool) -> None:
    split_pass, whole_pass = (PassResult(attributes={"layer.level": number}) for number in (split, whole))
    found = compare_with_whole(
        split_pass, whole_pass, [], [], RoundingLimits(whole_pass, whole_pass)
    ).differences
    assert [(d.kind, d.name) for d in found] == [("attribute", "layer.level")] * is_seen


def test_missing_gradients_and_copies_that_differ_are_seen() -> None:
    whole = PassResult("", {"": torch.tensor(2.0)}, {"w": torch.ones(8)})
    limits = RoundingLimits(whole, whole)
    missing = compare_with_whole(PassResult("", dict(whole.outputs)), whole, [], [], limits).differences
    assert [d.kind for d in missing] == ["gradient"]
    digests = [{"w": (8.0, 2.8)}, {"w": (8.0, 2.9)}]
    apart = compare_with_whole(whole, whole, digests, [], limits).differences
    assert [d.kind for d in apart] == ["replica"]
