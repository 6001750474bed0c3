"""Experts spread over ranks give the numbers of plain single-process training on the batches of all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lockstep.comm import CommCounter, local, total_norm, whole
from lockstep.config import Activation
from lockstep.errors import CollectiveMismatchError, ConfigError, UsageError
from lockstep.nn import MixtureOfExperts, load_balance_loss, router_z_loss
from lockstep.parallel import apply_activation_checkpointing
from lockstep.parallel.expert import expert_parallel, share_routing
from lockstep.runtime import start_runtime
from parallel.expert import problem
from parallel.expert.problem import BALANCE, EXPERTS, HIDDEN, WIDTH, Net, PlainMixture, Result, Z
from tests.marks import again

STEPS = 20


class Spread:
    """A model whose experts are spread over ``ep`` neighbouring ranks; gradients are averaged by hand."""

    def __init__(self, make: Callable[[], nn.Module], ep: int) -> None:
        runtime = start_runtime(cpu=True)
        self.rank, self.size, self.ep = runtime.rank, runtime.world_size, ep
        self.model = problem.values(make())
        self.experts: set[nn.Parameter] = set()
        self.replicas: Any = None
        if ep == 1:
            share_routing(self.model)
            return
        mesh = init_device_mesh("cpu", (self.size // ep, ep), mesh_dim_names=("replicate", "ep"))
        self.replicas = mesh["replicate"].get_group()
        self.experts = set(expert_parallel(self.model, mesh["ep"]))

    def mine(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [tensor.chunk(self.size)[self.rank] for tensor in tensors]

    def average(self) -> None:
        """Each gradient, over the ranks that hold the parameter."""
        for parameter in self.model.parameters():
            group = self.replicas if parameter in self.experts else None
            gradient = local(parameter.grad)
            dist.all_reduce(gradient, group=group)
            gradient /= dist.get_world_size(group)

    def gradients(self) -> dict[str, torch.Tensor]:
        return whole({name: p.grad.clone() for name, p in self.model.named_parameters()})


def mean(number: torch.Tensor) -> float:
    number = number.detach().clone()
    dist.all_reduce(number)
    return number.item() / dist.get_world_size()


def train(ep: int, top_k: int, factor: float | None, recomputes: bool) -> Result:
    spread = Spread(lambda: Net(lambda: MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, top_k, factor)), ep)
    if recomputes:
        apply_activation_checkpointing(
            spread.model, Activation.FULL, dict(spread.model.blocks.named_children())
        )
    optimizer = torch.optim.AdamW(spread.model.parameters(), lr=1e-2)
    result = Result([], [], [], {}, [], [])
    for step in range(STEPS):
        loss = problem.task_loss(spread.model, *spread.mine(problem.batch(step)))
        balance, z = load_balance_loss(spread.model), router_z_loss(spread.model)
        optimizer.zero_grad()
        (loss + BALANCE * balance + Z * z).backward()
        spread.average()
        result.gradients = spread.gradients()
        norm = total_norm([p.grad for p in spread.model.parameters()])
        expected = torch.stack([gradient.norm() for gradient in result.gradients.values()]).norm()
        torch.testing.assert_close(norm, expected)
        optimizer.step()
        result.losses.append(mean(loss))
        result.balance.append(balance.item())
        result.z.append(z.item())
        load = spread.model.blocks[0].load
        result.tokens_per_expert = load.tokens_per_expert.tolist()
        result.dropped.append(load.dropped_fraction.item())
    return result


@pytest.mark.parametrize(
    ("ranks", "ep", "top_k", "factor", "recomputes"),
    [
        (2, 2, 2, None, False),
        (2, 2, 1, 1.0, True),
        again(4, 2, 2, 0.8, False),
        again(4, 4, 2, 0.8, True),
        (2, 1, 2, 0.8, False),
    ],
)
def test_training_is_that_of_one_process(
    run_distributed: Any, ranks: int, ep: int, top_k: int, factor: float | None, recomputes: bool
) -> None:
    expected = problem.train_plainly(top_k, factor, STEPS)
    for result in run_distributed(train, ranks, ep, top_k, factor, recomputes):
        assert result.losses == pytest.approx(expected.losses, rel=5e-6)
        assert result.balance == pytest.approx(expected.balance, rel=5e-6)
        assert result.z == pytest.approx(expected.z, rel=5e-6)
        assert problem.difference(result.gradients, expected.gradients) < 1e-5
        assert result.tokens_per_expert == expected.tokens_per_expert
        assert result.dropped == pytest.approx(expected.dropped, abs=1e-6)
    assert (max(expected.dropped) > 0.05) == (factor is not None)


# -- routing at its extremes -----------------------------------------------------------------------------

FAVOURITES = {2: "00000 13313", 4: "000 313 111 030"}
"""The expert of each token, rank by rank: all of rank 0's go to one, which is its own; nobody's go to expert 2."""


def crafted(ranks: int) -> torch.Tensor:
    """Tokens (T, width) whose largest entry among the first E is that of their favourite expert."""
    favourites = torch.tensor([int(expert) for expert in FAVOURITES[ranks].replace(" ", "")])
    noise = torch.randn(len(favourites), WIDTH, generator=torch.Generator().manual_seed(2))
    noise[:, :EXPERTS] = nn.functional.one_hot(favourites, EXPERTS) + 0.01 * noise[:, :EXPERTS]
    return noise


def follow_favourites(layer: Any) -> None:
    with torch.no_grad():
        layer.router.weight.copy_(5 * torch.eye(EXPERTS, WIDTH))


def extremes(ep: int) -> tuple[list[int], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Rank r counts its loss, also that of balance, r + 1 times."""
    spread = Spread(lambda: MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 1), ep)
    follow_favourites(spread.model)
    (tokens,) = spread.mine((crafted(spread.size),))
    tokens.requires_grad_()
    loss = spread.model(tokens).square().mean()
    ((spread.rank + 1) * (loss + spread.model.balance_loss)).backward()
    spread.average()
    load = spread.model.load.tokens_per_expert.tolist()
    return load, spread.gradients(), tokens.grad / spread.size, loss.detach()


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), again(4, 4)])
def test_an_expert_without_tokens_and_a_rank_whose_tokens_share_one(
    run_distributed: Any, ranks: int, ep: int
) -> None:
    layer = problem.values(PlainMixture(1))
    follow_favourites(layer)
    tokens = crafted(ranks).requires_grad_()
    losses = [part.square().mean() for part in layer(tokens).chunk(ranks)]
    (sum((rank + 1) * (loss + layer.balance) for rank, loss in enumerate(losses)) / ranks).backward()
    expected = {name: p.grad for name, p in layer.named_parameters()}
    assert layer.tokens_per_expert[2] == 0
    assert expected["experts.weight_in"][2].norm() == 0
    results = run_distributed(extremes, ranks, ep)
    for rank, (load, gradients, token_gradients, loss) in enumerate(results):
        assert load == layer.tokens_per_expert
        assert problem.difference(gradients, expected) < 1e-5
        torch.testing.assert_close(token_gradients, tokens.grad.chunk(ranks)[rank], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(loss, losses[rank].detach())


# -- bytes -----------------------------------------------------------------------------------------------


def traffic(factor: float | None, bf16: bool) -> dict[str, Any]:
    spread = Spread(lambda: Net(lambda: MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2, factor)), ep=2)
    inputs, labels = spread.mine(problem.batch(0))
    found: dict[str, Any] = {}
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        with CommCounter() as forward:
            loss = problem.task_loss(spread.model, inputs, labels)
    with CommCounter() as backward:
        (loss + BALANCE * load_balance_loss(spread.model)).backward()
    for name, counter in (("forward", forward), ("backward", backward)):
        found[name] = [(one.operation, one.payload_bytes, one.dtype) for one in counter.records]
    found["loss"] = loss.item()
    experts = [module.experts for module in spread.model.blocks]
    found["held"] = sum(local(p).nbytes for module in experts for p in module.parameters())
    found["whole"] = sum(p.nbytes for module in experts for p in module.parameters())
    found["names"] = [name for name, _ in spread.model.named_parameters()]
    return found


@pytest.mark.parametrize(("factor", "bf16"), [(None, True), (0.8, False)])
def test_each_layer_sends_its_rows_four_times_and_three_small_messages(
    run_distributed: Any, factor: float | None, bf16: bool
) -> None:
    """An all-to-all each for dispatch and combine, there and back in backward."""
    model = problem.values(Net(lambda: PlainMixture(2, factor)))
    expected_loss = problem.task_loss(model, *problem.batch(0)).item()
    nbytes, dtype = (2, torch.bfloat16) if bf16 else (4, torch.float32)
    results = run_distributed(traffic, 2, factor, bf16)
    sent, received = [0, 0], [0, 0]
    for found in results:
        counts = ("all_gather", 2 * (2 * EXPERTS + 1) * 8, torch.int64)
        sums = ("all_reduce", (EXPERTS + 1) * 4, torch.float32)
        for layer in range(2):
            gather, reduce, dispatch, combine = found["forward"][4 * layer : 4 * layer + 4]
            combine_back, dispatch_back, reduce_back = found["backward"][3 * (1 - layer) : 3 * (2 - layer)]
            assert (gather, reduce, reduce_back) == (counts, sums, sums)
            assert dispatch == combine_back
            assert combine == dispatch_back
            assert {dispatch[0], combine[0]} == {"all_to_all"}
            assert {dispatch[2], combine[2]} == {dtype}
            sent[layer] += dispatch[1]
            received[layer] += combine[1]
        assert found["forward"][8:] == [counts]  # that the forward is over
        assert len(found["backward"]) == 6
        assert found["held"] == found["whole"] / 2
        assert found["names"] == [name for name, _ in model.named_parameters()]
    assert sum(found["loss"] for found in results) / 2 == pytest.approx(
        expected_loss, rel=1e-2 if bf16 else 5e-6
    )
    for layer, block in enumerate(model.blocks):
        choices = 16 * problem.LENGTH * 2
        kept = choices - round(block.dropped * choices)
        assert sent[layer] == received[layer] == pytest.approx(kept * WIDTH * nbytes, abs=4 * WIDTH * bf16)


def evaluation() -> dict[str, list[str]]:
    found = {}
    for ep in (1, 2):
        spread = Spread(lambda: MixtureOfExperts(WIDTH, HIDDEN, EXPERTS), ep)
        for training in (True, False):
            spread.model.train(training)
            with torch.no_grad(), CommCounter() as counter:
                spread.model(torch.randn(3, WIDTH))
            found[f"ep={ep} training={training}"] = [one.operation for one in counter.records]
    return found


def test_in_eval_mode_a_rank_with_all_experts_needs_no_other(run_distributed: Any) -> None:
    for found in run_distributed(evaluation, 2):
        assert found["ep=1 training=True"] == ["all_gather", "all_reduce"]
        assert found["ep=1 training=False"] == []
        assert found["ep=2 training=False"] == ["all_gather", "all_reduce", "all_to_all", "all_to_all"]


# -- what is refused -------------------------------------------------------------------------------------


def refusals() -> list[tuple[type, str]]:
    runtime = start_runtime(cpu=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    flat = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "ep"))
    mixture = lambda experts=EXPERTS: MixtureOfExperts(WIDTH, HIDDEN, experts)  # noqa: E731
    twice = nn.Sequential(mixture())
    expert_parallel(twice, mesh)
    with torch.device("meta"):
        unset = mixture()
    one_rank_only = mixture() if runtime.rank == 0 else nn.Linear(2, 2)
    different = mixture(4 if runtime.rank == 0 else 8)
    alone = dist.new_group([runtime.rank], use_local_synchronization=True)
    calls: list[Callable[[], object]] = [
        lambda: expert_parallel(nn.Sequential(mixture(5)), mesh),
        lambda: expert_parallel(nn.Linear(2, 2), mesh),
        lambda: expert_parallel(twice, mesh),
        lambda: share_routing(twice),
        lambda: expert_parallel(unset, mesh),
        lambda: expert_parallel(one_rank_only, mesh),
        lambda: expert_parallel(different, mesh),
        lambda: expert_parallel(mixture(), flat),
        lambda: expert_parallel(mixture(), mesh, alone),
    ]
    found = []
    for call in calls:
        with pytest.raises((ConfigError, UsageError, CollectiveMismatchError)) as caught:
            call()
        found.append((caught.type, str(caught.value)))
    return found


def test_models_and_groups_that_do_not_fit_are_refused_on_all_ranks(run_distributed: Any) -> None:
    expected = [
        (ConfigError, "'0' has 5 experts, which do not divide by the 2 ranks of ep (5 / 2 is not whole)"),
        (UsageError, "Linear has no MixtureOfExperts"),
        (UsageError, "experts of '0' are spread over ranks already"),
        (UsageError, "experts of '0' are spread over ranks already"),
        (UsageError, "on the meta device"),
        (UsageError, "Linear has no MixtureOfExperts"),
        (CollectiveMismatchError, "Rank 0 of the group has 1 mixture-of-experts layers and rank 1 has 1"),
        (UsageError, "a mesh of 2 axes"),
        (UsageError, "spread over the ranks [0, 1], but batches come from"),
    ]
    for found in run_distributed(refusals, 2):
        for (kind, message), (expected_kind, part) in zip(found, expected, strict=True):
            assert kind is expected_kind, message
            assert re.search(re.escape(part), message), message


def seeds() -> list[torch.Tensor]:
    """Rank by rank another initialisation."""
    runtime = start_runtime(cpu=True)
    torch.manual_seed(runtime.rank)
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS)
    before = layer.experts.weight_in.detach().clone()
    layer.experts.bias_out.requires_grad_(False)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "ep"))
    returned = expert_parallel(layer, mesh["ep"])
    assert set(returned) == set(layer.experts.parameters())
    assert not layer.experts.bias_out.requires_grad
    return [before, whole(layer.experts.weight_in.detach()), local(layer.experts.weight_in)]


def test_all_ranks_take_the_first_ones_experts(run_distributed: Any) -> None:
    (first, after, part0), (other, after1, part1) = run_distributed(seeds, 2)
    assert not torch.equal(first, other)
    assert torch.equal(after, first)
    assert torch.equal(after1, first)
    assert torch.equal(torch.cat([part0, part1]), first)
