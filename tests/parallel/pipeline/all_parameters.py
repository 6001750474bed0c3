"""Loops over all parameters of a model, as people write them. Each runs in plain torch, and with a pipelined model.

A loop gets the model, a function that trains it on the next batch, and how a gradient is made. It returns nothing: what
it has changed is the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.optim.swa_utils
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The scale is listed first, and used last.
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x) * self.scale


@dataclass
class Run:
    """``model`` as prepared; ``listed``: its parameters from before it was."""

    model: Any
    listed: list[nn.Parameter]
    prepare: Callable[..., Any]
    call_backward: Callable[[Tensor], None]
    clip: Callable[..., Any]
    batches: int = 0
    rate: float = 0.1

    def loss(self) -> Tensor:
        self.batches += 1
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(self.batches))
        return self.model(x).square().mean()

    def backward(self) -> None:
        self.call_backward(self.loss())

    def made_optimizer(self) -> Any:
        return self.prepare(torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=0.9))

    def steps(self, count: int = 2, before: Callable[[], object] = lambda: None) -> None:
        optimizer = self.made_optimizer()
        for _ in range(count):
            self.backward()
            before()
            optimizer.step()
            optimizer.zero_grad()


Loop = Callable[[Run], None]
EQUAL: dict[str, Loop] = {}
REFUSED: dict[str, Loop] = {}


def equal(loop: Loop) -> Loop:
    EQUAL[loop.__name__] = loop
    return loop


def refused(loop: Loop) -> Loop:
    REFUSED[loop.__name__] = loop
    return loop


# -- what pairs parameters with each other ---------------------------------------------------------------


@equal
def lookahead(run: Run) -> None:
    run.steps(1)
    slow = [p.detach().clone() for p in run.model.parameters()]
    for _ in range(2):
        run.steps(2)
        with torch.no_grad():
            for old, p in zip(slow, run.model.parameters(), strict=True):
                old.lerp_(p, 0.5)
                p.copy_(old)


@refused
def lookahead_from_before_the_first_forward(run: Run) -> None:
    slow = [p.detach().clone() for p in run.model.parameters()]
    run.steps(2)
    with torch.no_grad():
        for old, p in zip(slow, run.model.parameters(), strict=True):
            old.lerp_(p, 0.5)
            p.copy_(old)


@refused
def copies_from_before_prepare(run: Run) -> None:
    plain = Net()
    run.steps(1)
    with torch.no_grad():
        for mine, p in zip(plain.parameters(), run.model.parameters(), strict=True):
            mine.copy_(p)


@equal
def average_swapped_in_and_out(run: Run) -> None:
    run.steps(1)
    average = [p.detach().clone() for p in run.model.parameters()]
    run.steps(1)
    stored = [p.data.clone() for p in run.model.parameters()]
    for p, other in zip(run.model.parameters(), average, strict=True):
        p.data.copy_(other)
    run.loss()
    for p, other in zip(run.model.parameters(), stored, strict=True):
        p.data.copy_(other)


@equal
def average_swapped_in_by_data(run: Run) -> None:
    run.steps(1)
    backup = [p.data for p in run.model.parameters()]
    for p in run.model.parameters():
        p.data = p.data * 0.5
    run.loss()
    for p, kept in zip(run.model.parameters(), backup, strict=True):
        p.data = kept


@equal
def average_that_is_a_model(run: Run) -> None:
    average = run.prepare(copy.deepcopy(NEW[0]).requires_grad_(False))
    run.steps(2)
    with torch.no_grad():
        for averaged, p in zip(average.parameters(), run.model.parameters(), strict=True):
            averaged.lerp_(p, 0.25)
        for averaged, p in zip(average.parameters(), run.model.parameters(), strict=True):
            p.copy_(averaged)


@equal
def seeded_noise_without_gradients(run: Run) -> None:
    run.loss()
    for sign in (1, -2, 1):
        torch.manual_seed(5)
        for p in run.model.parameters():
            noise = torch.normal(0.0, 1.0, size=p.data.size(), device=p.data.device, dtype=p.data.dtype)
            p.data.add_(noise, alpha=sign * 0.01)
    torch.manual_seed(5)
    for p in run.model.parameters():
        p.data.add_(torch.normal(0.0, 1.0, size=p.size(), device=p.device), alpha=-0.1)


@equal
def weights_decayed_by_hand(run: Run) -> None:
    run.steps(1)
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.9)
            p.clamp_(-0.2, 0.2)


@equal
def data_assigned(run: Run) -> None:
    run.steps(1)
    for p in run.model.parameters():
        p.data = p.data * 0.5


@equal
def counted(run: Run) -> None:
    before = sum(p.numel() for p in run.model.parameters())
    run.steps(1)
    assert (
        before == sum(p.numel() for p in run.model.parameters()) == sum(p.numel() for p in Net().parameters())
    )
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert {p.device.type for p in run.model.parameters()} == {"cpu"}


@equal
def names_stay(run: Run) -> None:
    before = [(name, id(p)) for name, p in run.model.named_parameters()][1:3]
    run.steps(1)
    assert [name for name, _ in before] == [name for name, _ in run.model.named_parameters()][1:3]
    assert [name for name, _ in run.model.named_parameters()] == [
        name for name, _ in Net().named_parameters()
    ]


@equal
def frozen_by_names(run: Run) -> None:
    run.loss()
    for name, p in run.model.named_parameters():
        p.requires_grad_("up" not in name)
    run.steps(2)


@equal
def groups_by_names(run: Run) -> None:
    named = list(run.model.named_parameters())
    groups = [
        {"params": [p for name, p in named if ("bias" in name) == is_bias], "lr": 0.1 / (1 + is_bias)}
        for is_bias in (False, True)
    ]
    optimizer = run.prepare(torch.optim.SGD(groups))
    for _ in range(2):
        run.backward()
        optimizer.step()
        optimizer.zero_grad()


@equal
def a_step_by_hand_on_what_is_here(run: Run) -> None:
    run.backward()
    with torch.no_grad():
        for p in run.model.parameters():
            if not p.is_meta:
                p.sub_(p.grad, alpha=0.1)


@equal
def an_optimizer_for_each_block(run: Run) -> None:
    run.loss()
    named = list(run.model.named_parameters())
    of_blocks = [[p for name, p in named if name.startswith(f"layers.{i}.")] for i in range(4)]
    parts = [*of_blocks, [p for name, p in named if not name.startswith("layers.")]]
    optimizers = [run.prepare(torch.optim.SGD(part, lr=0.1)) for part in parts]
    for _ in range(2):
        run.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@equal
def decayed_by_groups_of_the_optimizer(run: Run) -> None:
    run.loss()
    optimizer = run.made_optimizer()
    run.backward()
    optimizer.step()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.9)


@equal
def gradients_centralised_where_they_are(run: Run) -> None:
    def centralise() -> None:
        for p in run.model.parameters():
            if not p.is_meta and p.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))

    run.steps(2, centralise)


@equal
def clipped_by_accelerator(run: Run) -> None:
    norms: list[float] = []
    run.steps(3, lambda: norms.append(float(run.clip(run.model.parameters(), 0.1))))
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(norms[-1])


# -- numbers of all parameters ---------------------------------------------------------------------------


@refused
def clipped_by_torch(run: Run) -> None:
    run.steps(1, lambda: nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))


@refused
def clipped_by_torch_from_before_prepare(run: Run) -> None:
    run.steps(1, lambda: nn.utils.clip_grad_norm_(run.listed, 0.1))


@refused
def clipped_by_torch_without_the_wrapper(run: Run) -> None:
    run.steps(1, lambda: nn.utils.clip_grad_norm_(run.model.module.parameters(), 0.1))


@refused
def clipped_by_torch_as_groups(run: Run) -> None:
    optimizer = run.made_optimizer()
    run.backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


@equal
def each_block_clipped_by_torch(run: Run) -> None:
    def clip() -> None:
        for layer in run.model.layers:
            nn.utils.clip_grad_norm_(layer.parameters(), 0.1)

    run.steps(2, clip)


@refused
def norm_of_all_at_once(run: Run) -> None:
    run.steps(1, lambda: torch._foreach_norm([p.grad for p in run.model.parameters()]))


@refused
def an_optimizer_in_backward(run: Run) -> None:
    for p in run.model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)


@refused
def torch_averaged_model(run: Run) -> None:
    run.steps(1)
    torch.optim.swa_utils.AveragedModel(run.model)


@refused
def norm_by_hand(run: Run) -> None:
    def norm() -> float:
        return sum(p.grad.norm().item() ** 2 for p in run.model.parameters() if p.grad is not None) ** 0.5

    run.steps(1, norm)


@refused
def norm_of_weights(run: Run) -> None:
    run.steps(1)
    float(torch.stack([p.detach().norm() for p in run.model.parameters()]).norm())


@refused
def sharpness_aware(run: Run) -> None:
    run.backward()
    norm = torch.stack([p.grad.norm() for p in run.model.parameters()]).norm()
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(p.grad, alpha=float(0.05 / norm))


@refused
def penalty_on_all_weights(run: Run) -> None:
    loss = run.loss()
    run.call_backward(loss + 0.1 * sum(p.square().sum() for p in run.model.parameters()))


@refused
def penalty_on_weights_of_blocks(run: Run) -> None:
    loss = run.loss()
    run.call_backward(loss + 0.1 * sum(layer.up.weight.square().sum() for layer in run.model.layers))


@refused
def penalty_by_plain_backward(run: Run) -> None:
    loss = run.loss()
    (loss + 0.1 * sum(layer.up.weight.square().sum() for layer in run.model.layers)).backward()


@refused
def penalty_alone(run: Run) -> None:
    run.loss()
    run.call_backward(0.1 * sum(layer.up.weight.square().sum() for layer in run.model.layers))


@refused
def noise_like_weights(run: Run) -> None:
    run.loss()
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)


@refused
def curvature(run: Run) -> None:
    torch.autograd.grad(run.loss(), list(run.model.parameters()), create_graph=True)


@refused
def a_block_copied_into_another(run: Run) -> None:
    run.steps(1)
    with torch.no_grad():
        run.model.layers[0].up.weight.copy_(run.model.layers[3].up.weight)


@refused
def blocks_scaled_by_the_norm_of_one(run: Run) -> None:
    run.steps(1)
    with torch.no_grad():
        norm = run.model.layers[0].up.weight.norm()
        for layer in run.model.layers:
            layer.down.weight.mul_(norm)


@refused
def the_mean_of_two_blocks(run: Run) -> None:
    run.steps(1)
    with torch.no_grad():
        first, last = run.model.layers[0].up.weight, run.model.layers[3].up.weight
        mean = (first + last) / 2
        first.copy_(mean)
        last.copy_(mean)


@refused
def averaged_in_one_operation(run: Run) -> None:
    run.steps(1)
    average = [torch.zeros(p.shape) for p in run.model.parameters()]
    torch._foreach_lerp_(average, [p.detach() for p in run.model.parameters()], 0.5)


NEW: list[nn.Module] = []
"""The model as it is when a loop begins."""


def new() -> nn.Module:
    torch.manual_seed(0)
    NEW[:] = [Net()]
    return copy.deepcopy(NEW[0])
