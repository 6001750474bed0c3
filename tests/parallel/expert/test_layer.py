"""A mixture of experts on one device, against one in which every token visits every expert."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import ConfigError, UsageError
from lockstep.nn import MixtureOfExperts, load_balance_loss, router_z_loss
from lockstep.parallel.expert import count_choices, kept_slots, traffic, within_capacity
from parallel.expert import problem
from parallel.expert.problem import EXPERTS, HIDDEN, WIDTH, PlainMixture
from tests.marks import examples
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


def test_a_token_dropped_everywhere_adds_nothing() -> None:
    layer = problem.values(mixture(1, 4 / 10))  # one choice for each expert
    same = torch.ones(10, WIDTH)
    outputs = layer(same)
    assert outputs[0].abs().min() > 0
    assert outputs[1:].abs().max() == 0
    assert layer.load.dropped_fraction.item() == pytest.approx(0.9)


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


def test_no_tokens_and_all_gates_without_renormalising() -> None:
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, top_k=EXPERTS, bias=False, renormalize=False)
    assert layer(torch.zeros(0, 3, WIDTH)).shape == (0, 3, WIDTH)
    assert layer.load.balance_loss.item() == 0
    routing = layer.router(torch.randn(5, WIDTH))
    torch.testing.assert_close(routing.gates.sum(1), torch.ones(5))
    assert sum(1 for _ in layer.parameters()) == 3


def test_a_kept_layer_can_be_copied_pickled_and_loaded() -> None:
    layer = mixture()
    tokens = torch.randn(6, WIDTH)
    outputs = layer(tokens)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(tokens), outputs)
    other = mixture()
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(tokens), outputs)


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
CHOICES = st.integers(1, 4).flatmap(
    lambda top_k: st.lists(
        st.lists(st.permutations(range(4)).map(lambda order: order[:top_k]), max_size=9),
        min_size=1,
        max_size=4,
    ).map(lambda ranks: (top_k, ranks))
)


@examples(60)
@given(CHOICES, st.integers(0, 12))
def test_dispatch_keeps_and_orders_as_one_queue_over_all_ranks(
    given: tuple[int, list[list[list[int]]]], limit: int
) -> None:
    top_k, ranks = given
    choices = [torch.tensor(rows, dtype=torch.long).view(-1, top_k) for rows in ranks]
    counts = torch.stack([count_choices(each, 4) for each in choices])
    kept = within_capacity(counts, torch.tensor(limit))

    room = [limit] * 4
    expected: list[list[tuple[int, int]]] = [[] for _ in ranks]  # (expert, slot)
    for choice in range(top_k):
        for rank, rows in enumerate(ranks):
            for token, row in enumerate(rows):
                if room[row[choice]] > 0:
                    room[row[choice]] -= 1
                    expected[rank].append((row[choice], token * top_k + choice))
    for rank, each in enumerate(choices):
        slots = kept_slots(each, kept[rank]).tolist()
        assert slots == [slot for _, slot in sorted(expected[rank])]


@examples(40)
@given(st.sampled_from([(1, 4), (2, 4), (4, 4), (3, 6)]), st.randoms(use_true_random=False))
def test_traffic_fits_together_and_sorts_by_expert_then_by_rank(sizes: tuple[int, int], random) -> None:
    ranks, experts = sizes
    rows = torch.tensor([[random.choice([0, 0, 1, 5]) for _ in range(experts)] for _ in range(ranks)])
    plans = [traffic(rows, rank) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        assert plan.received == [other.sent[rank] for other in plans]
        mine = range(rank * experts // ranks, (rank + 1) * experts // ranks)
        arrived = [(e, source) for source in range(ranks) for e in mine for _ in range(rows[source, e])]
        assert [arrived[index] for index in plan.order.tolist()] == sorted(arrived)
        assert plan.per_expert == [int(rows[:, e].sum()) for e in mine]
