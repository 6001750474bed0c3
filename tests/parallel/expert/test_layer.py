"""A mixture of experts on one device, against one in which every token visits every expert."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import ConfigError, UsageError
from lockstep.nn import MixtureOfExperts, load_balance_loss, router_z_loss
from parallel.expert import problem
from parallel.expert.problem import EXPERTS, HIDDEN, WIDTH, PlainMixture
from tests.refusals import expect_refusal


def mixture(top_k: int = 2, factor: float | None = None) -> MixtureOfExperts:
    return MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, top_k, factor)


@pytest.mark.parametrize(
    ("top_k", "factor"), [(1, None), (2, None), (4, None), (1, 1.0), (2, 0.6), (3, 1.1), (2, 1e-9)]
)
def test_outputs_gradients_losses_and_drops_are_those_of_the_plain_layer(
    top_k: int, factor: float | None
) -> None:
    real, plain = problem.values(mixture(top_k, factor)), problem.values(PlainMixture(top_k, factor))
    hidden = torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(3))
    weights = torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(4))
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    outputs = [model(each) for model, each in zip((real, plain), inputs, strict=True)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    assert real.balance_loss.item() == pytest.approx(plain.balance.item(), rel=1e-6)
    assert router_z_loss(real).item() == pytest.approx(plain.z.item(), rel=1e-5)
    assert real.load.tokens_per_expert.tolist() == plain.tokens_per_expert
    assert real.load.dropped_fraction.item() == pytest.approx(plain.dropped, abs=1e-6)
    assert (plain.dropped > 0) == (factor is not None)

    ((outputs[0] * weights).sum() + load_balance_loss(real) + 0.1 * real.load.z_loss).backward()
    ((outputs[1] * weights).sum() + plain.balance + 0.1 * plain.z).backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
    found, expected = ({n: p.grad for n, p in model.named_parameters()} for model in (real, plain))
    assert problem.difference(found, expected) < 2e-6


def test_the_balance_loss_is_1_at_even_load_and_the_number_of_experts_where_one_has_all() -> None:
    layer = mixture(1)
    with torch.no_grad():
        layer.router.weight.copy_(100 * torch.eye(EXPERTS, WIDTH))
    layer(torch.eye(EXPERTS, WIDTH))
    assert layer.balance_loss.item() == pytest.approx(1)
    layer(torch.eye(EXPERTS, WIDTH)[:1].repeat(6, 1))
    assert layer.balance_loss.item() == pytest.approx(EXPERTS)


def test_of_equally_likely_experts_the_first_are_chosen() -> None:
    layer = mixture(2)
    layer(torch.zeros(3, WIDTH))
    assert layer.load.tokens_per_expert.tolist() == [3, 3, 0, 0]


def test_under_autocast_experts_compute_in_bf16_and_the_router_in_float32() -> None:
    layer = problem.values(mixture())
    tokens = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = layer(tokens)
    balance = layer.balance_loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = layer(tokens)
    assert outputs.dtype == torch.bfloat16
    assert layer.balance_loss.item() == balance
    assert 1e-4 < (outputs - expected).norm() / expected.norm() < 2e-2


def test_checkpointing_keeps_the_losses_that_are_in_the_graph() -> None:
    gradients = []
    for recomputes in (False, True):
        layer = problem.values(mixture())
        tokens = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
        outputs = checkpoint(layer, tokens, use_reentrant=False) if recomputes else layer(tokens)
        balance = layer.balance_loss
        (outputs.square().sum() + balance).backward()
        assert layer.balance_loss is balance
        gradients.append({name: p.grad for name, p in layer.named_parameters()})
    assert problem.difference(*gradients) == 0


def test_reentrant_checkpointing_warns_that_the_balance_loss_has_no_gradient() -> None:
    layer = mixture()
    outputs = checkpoint(layer, torch.randn(4, WIDTH, requires_grad=True), use_reentrant=True)
    with pytest.warns(UserWarning, match="use_reentrant=False"):
        outputs.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"width": -1}, "width is -1"),
        ({"top_k": 5}, "top_k is 5"),
        ({"top_k": 0}, "top_k is 0"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan"),
        ({"top_k": 1, "renormalize": True}, "the router would never learn"),
    ],
)
def test_impossible_sizes_are_refused(arguments: dict[str, object], message: str) -> None:
    sizes: dict[str, object] = {"width": WIDTH, "hidden": HIDDEN, "num_experts": EXPERTS}
    expect_refusal(ConfigError, message, MixtureOfExperts, **{**sizes, **arguments})


def test_wrong_tokens_and_early_questions_are_refused() -> None:
    layer = mixture()
    expect_refusal(UsageError, "not called", load_balance_loss, layer)
    expect_refusal(UsageError, "3 features", layer, torch.randn(2, 3))
    expect_refusal(UsageError, "Linear", router_z_loss, nn.Linear(2, 2))


# Of each rank, of each token: the experts that it chooses.
