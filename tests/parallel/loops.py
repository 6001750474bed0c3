"""Training loops that people write. Each runs in plain torch on one process, and prepared on several ranks.

A loop gets a ``Run``: ``Plain`` trains on the rows of all ranks at once and is the oracle, ``Prepared`` on those of its
own rank. It returns what training has changed.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

RANKS, ROWS, WIDTH = 2, 4, 6
Values = dict[str, torch.Tensor]
Losses = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


class Plain:
    """One process and no library: what a loop must come to."""

    is_plain = True
    ranks = tuple(range(RANKS))

    def __init__(self, steps: int = 1) -> None:
        self.accumulation_steps = steps
        self.micro_batch = 0

    def prepare(self, *objects: Any) -> Any:
        return objects if len(objects) > 1 else objects[0]

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        (loss / self.accumulation_steps).backward(**options)

    def mean(self, loss: Losses, step: int) -> torch.Tensor:
        """The mean over the ranks of ``loss(rank, inputs, targets)``, on rows of their own."""
        return torch.stack([loss(rank, *rows(step, rank)) for rank in self.ranks]).mean()

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        self.micro_batch += 1
        yield

    @property
    def steps_now(self) -> bool:
        return self.micro_batch % self.accumulation_steps == 0

    def step(self, optimizer: Any) -> None:
        if self.steps_now:
            optimizer.step()
            optimizer.zero_grad()

    def clip(self, model: nn.Module, norm: float) -> None:
        if self.steps_now:
            nn.utils.clip_grad_norm_(model.parameters(), norm)

    def clip_value(self, model: nn.Module, value: float) -> None:
        if self.steps_now:
            nn.utils.clip_grad_value_(model.parameters(), value)

    def unwrap(self, model: nn.Module) -> Any:
        return model

    def no_sync(self, model: nn.Module) -> Any:
        return contextlib.nullcontext()


class Prepared(Plain):
    """The same calls on an ``Accelerator``, on the rows of its rank."""

    is_plain = False

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator.gradient_accumulation_steps)
        self.accelerator = accelerator
        self.ranks = (accelerator.process_index,)

    def prepare(self, *objects: Any) -> Any:
        return self.accelerator.prepare(*objects)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.accelerator.backward(loss, **options)

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        with self.accelerator.accumulate(*models):
            yield

    def step(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def clip(self, model: nn.Module, norm: float) -> None:
        self.accelerator.clip_grad_norm_(model.parameters(), norm)

    def clip_value(self, model: nn.Module, value: float) -> None:
        self.accelerator.clip_grad_value_(model.parameters(), value)

    def unwrap(self, model: nn.Module) -> Any:
        return self.accelerator.unwrap_model(model)

    def no_sync(self, model: nn.Module) -> Any:
        return self.accelerator.no_sync(model)


Run = Plain


def rows(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (
        torch.randn(ROWS, WIDTH, generator=generator),
        torch.randn(ROWS, WIDTH, generator=generator),
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks that are sharded one by one, and two heads, of which a call uses one."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


class Heads(Net):
    """Two heads of equal shape: a call says which it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, which: str = "both") -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        if which == "both":
            return self.head(x) * self.scale, self.other(x)
        return (self.head if which == "head" else self.other)(x) * self.scale


def make(kind: Callable[..., nn.Module], *args: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(*args)


def adamw(module: Any) -> torch.optim.Optimizer:
    """Where a missing gradient and one of zeros are not the same; eps keeps rounding small."""
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1, eps=1e-2)


def sgd(module: Any) -> torch.optim.Optimizer:
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def values(run: Run, **models: nn.Module) -> Values:
    """All parameters and buffers, whole."""
    found = {}
    for key, model in models.items():
        if not run.is_plain:
            for part in model.modules():
                if hasattr(part, "reshard"):
                    part.reshard()
        plain = run.unwrap(model)
        for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
            whole = tensor.detach()
            found[f"{key}.{name}"] = (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).clone()
    return found


def mse(model: Any, *args: Any) -> Losses:
    return lambda rank, x, y: F.mse_loss(model(x, *args), y)


# Several losses --------------------------------------------------------------------------------------


def two_losses_of_one_output(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        parts = [(model(rows(step, rank)[0]), rows(step, rank)[1]) for rank in run.ranks]
        first = torch.stack([F.mse_loss(out, y) for out, y in parts]).mean()
        second = torch.stack([F.l1_loss(out, y) for out, y in parts]).mean()
        run.backward(first, retain_graph=True)
        run.backward(second)
        run.step(optimizer)
    return values(run, model=model)


def two_forwards_and_two_backwards(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.backward(run.mean(mse(model), 10 + step))
        run.step(optimizer)
    return values(run, model=model)


def two_forwards_then_two_backwards(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        first = run.mean(mse(model), step)
        second = run.mean(mse(model), 10 + step)
        run.backward(first)
        run.backward(second)
        run.step(optimizer)
    return values(run, model=model)


def a_backward_for_each_head(run: Run) -> Values:
    model = make(Heads)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        parts = [(model(rows(step, rank)[0]), rows(step, rank)[1]) for rank in run.ranks]
        run.backward(torch.stack([F.mse_loss(out[0], y) for out, y in parts]).mean(), retain_graph=True)
        run.backward(torch.stack([F.l1_loss(out[1], y) for out, y in parts]).mean())
        run.step(optimizer)
    return values(run, model=model)


def heads_in_turn(run: Run) -> Values:
    """All ranks use one head in a step, the other in the next; AdamW must not decay the one at rest."""
    model = make(Heads)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(6):
        run.backward(run.mean(mse(model, "head" if step % 3 else "other"), step))
        run.step(optimizer)
    return values(run, model=model)


def sum_of_two_models(run: Run) -> Values:
    first, second = make(Net), make(Net, 2, seed=1)
    optimizer = adamw([*first.parameters(), *second.parameters()])
    first, second, optimizer = run.prepare(first, second, optimizer)
    for step in range(4):
        run.backward(run.mean(lambda _, x, y: F.mse_loss(first(x) + second(x), y), step))
        run.step(optimizer)
    return values(run, first=first, second=second)


def regularised_by_hand(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        loss = run.mean(mse(model), step)
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        run.backward(loss + 1e-3 * penalty)
        run.step(optimizer)
    return values(run, model=model)


# Branches --------------------------------------------------------------------------------------------


def _branches(run: Run, first: int, steps: int = 5) -> Values:
    """From step ``first`` on rank 0 uses one head and rank 1 the other; before, all use both."""
    model = make(Heads)
    model, optimizer = run.prepare(model, adamw(model))

    def loss(step: int) -> Losses:
        def of(rank: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if step >= first:
                return F.mse_loss(model(x, "head" if rank == 0 else "other"), y)
            head, other = model(x)
            return F.mse_loss(head + other, y)

        return of

    for step in range(steps):
        with run.accumulate(model):
            run.backward(run.mean(loss(step), step))
            run.step(optimizer)
    return values(run, model=model)


def a_head_for_each_rank(run: Run) -> Values:
    return _branches(run, first=0)


def a_head_for_each_rank_from_step_3(run: Run) -> Values:
    return _branches(run, first=3)


def a_head_of_one_rank_alone(run: Run) -> Values:
    model = make(Heads)
    model, optimizer = run.prepare(model, sgd(model))

    def loss(rank: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            return F.mse_loss(model(x, "head"), y)
        head, other = model(x)
        return F.mse_loss(head + other, y)

    for step in range(4):
        run.backward(run.mean(loss, step))
        run.step(optimizer)
    return values(run, model=model)


class ExpertBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        return super().forward(x) + self.experts[which](x)


class Experts(Net):
    """Experts inside of a block, chosen in Python."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(ExpertBlock() for _ in range(2))

    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, which)
        return self.head(x) * self.scale


def experts_chosen_in_python(run: Run) -> Values:
    model = make(Experts)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(5):
        loss = partial(_choosing, model, lambda rank, step: (step + rank) % 3, step)
        run.backward(run.mean(loss, step))
        run.step(optimizer)
    return values(run, model=model)


def _choosing(
    model: Any, choice: Callable[[int, int], int], step: int, rank: int, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    return F.mse_loss(model(x, choice(rank, step)), y)


class Drops(Net):
    """Whole blocks skipped."""

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            if i != skip:
                x = layer(x)
        return self.head(x) * self.scale


def blocks_skipped_on_all_ranks(run: Run) -> Values:
    model = make(Drops)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(5):
        run.backward(run.mean(mse(model, step % 4), step))
        run.step(optimizer)
    return values(run, model=model)


def blocks_skipped_on_one_rank(run: Run) -> Values:
    model = make(Drops)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(5):
        loss = partial(_choosing, model, lambda rank, step: step % 3 if rank else -1, step)
        run.backward(run.mean(loss, step))
        run.step(optimizer)
    return values(run, model=model)


def blocks_skipped_on_one_rank_from_step_3(run: Run) -> Values:
    model = make(Drops)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(5):
        loss = partial(_choosing, model, lambda rank, step: 1 if rank and step > 2 else -1, step)
        run.backward(run.mean(loss, step))
        run.step(optimizer)
    return values(run, model=model)


# Frozen parts ----------------------------------------------------------------------------------------


def unfrozen_later(run: Run) -> Values:
    model = make(Net)
    model.head.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(6):
        if step == 2:
            run.unwrap(model).head.requires_grad_(True)
        if step == 4:
            run.unwrap(model).layers[0].requires_grad_(True)
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def frozen_later(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(6):
        if step == 2:
            run.unwrap(model).head.requires_grad_(False)
        if step == 4:
            run.unwrap(model).layers[1].requires_grad_(False)
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def parts_frozen_in_turn(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(6):
        plain = run.unwrap(model)
        plain.layers.requires_grad_(step % 2 == 0)
        plain.head.requires_grad_(step % 2 == 1)
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def gradual_unfreezing_with_groups(run: Run) -> Values:
    """Groups are added to the optimizer as blocks thaw."""
    model = make(Net)
    model.layers.requires_grad_(False)
    model.embed.requires_grad_(False)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    model, optimizer = run.prepare(model, optimizer)
    for step in range(6):
        if step in (2, 3, 4):
            layer = run.unwrap(model).layers[4 - step]
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.01})
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def all_frozen_and_thawed(run: Run) -> Values:
    """Nothing is trained at prepare but the head; everything later."""
    model = make(Net)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        if step == 1:
            run.unwrap(model).requires_grad_(True)
        with run.accumulate(model):
            run.backward(run.mean(mse(model), step))
            run.step(optimizer)
    return values(run, model=model)


def nothing_trained_at_prepare(run: Run) -> Values:
    model = make(Net)
    model.requires_grad_(False)
    model, optimizer = run.prepare(model, adamw(model))
    run.unwrap(model).requires_grad_(True)
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def a_head_replaced_after_prepare(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        if step == 2:
            run.unwrap(model).head = make(nn.Linear, WIDTH, WIDTH, seed=5)
            optimizer.add_param_group({"params": list(run.unwrap(model).head.parameters())})
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


class Adapted(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if not hasattr(self, "adapter") else out + self.adapter(x)


def a_module_added_after_prepare(run: Run) -> Values:
    model = make(Adapted)
    model, optimizer = run.prepare(model, sgd(model))
    run.unwrap(model).adapter = make(nn.Linear, WIDTH, WIDTH, seed=5)
    optimizer.add_param_group({"params": list(run.unwrap(model).adapter.parameters())})
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def weights_tied_after_prepare(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    plain = run.unwrap(model)
    plain.head.weight = plain.embed.weight
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


# Several models --------------------------------------------------------------------------------------


def gan(run: Run) -> Values:
    generator, critic = make(Net), make(Net, 2, seed=1)
    optimizers = adamw(generator), adamw(critic)
    generator, critic, of_generator, of_critic = run.prepare(generator, critic, *optimizers)

    def fake_loss(_: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return critic(generator(x).detach()).mean() - critic(y).mean() + critic(y).pow(2).mean()

    for step in range(4):
        run.backward(run.mean(fake_loss, step))
        run.step(of_critic)
        run.backward(run.mean(lambda _, x, y: -critic(generator(x)).mean(), step))
        run.step(of_generator)
        of_critic.zero_grad()
    return values(run, generator=generator, critic=critic)


def gan_with_frozen_critic(run: Run) -> Values:
    """requires_grad is switched in each step, as many scripts do."""
    generator, critic = make(Net), make(Net, 2, seed=1)
    optimizers = adamw(generator), adamw(critic)
    generator, critic, of_generator, of_critic = run.prepare(generator, critic, *optimizers)
    for step in range(4):
        critic.requires_grad_(True)
        run.backward(
            run.mean(lambda _, x, y: critic(generator(x).detach()).mean() + critic(y).pow(2).mean(), step)
        )
        run.step(of_critic)
        critic.requires_grad_(False)
        run.backward(run.mean(lambda _, x, y: -critic(generator(x)).mean(), step))
        run.step(of_generator)
    return values(run, generator=generator, critic=critic)


def two_optimizers_on_one_model(run: Run) -> Values:
    model = make(Net)
    first, second = adamw(model.layers), sgd([*model.embed.parameters(), *model.head.parameters()])
    model, first, second = run.prepare(model, first, second)
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(first)
        if step % 2:
            run.step(second)
    return values(run, model=model)


def a_frozen_teacher(run: Run) -> Values:
    model, teacher = make(Net), make(Net, 2, seed=1).requires_grad_(False).eval()
    model, optimizer, teacher = run.prepare(model, adamw(model), teacher)
    for step in range(4):

        def loss(_: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = teacher(x)
            return F.mse_loss(model(x), wanted)

        run.backward(run.mean(loss, step))
        run.step(optimizer)
    return values(run, model=model)


def an_unprepared_teacher(run: Run) -> Values:
    model, teacher = make(Net), make(Net, 2, seed=1).requires_grad_(False).eval()
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        run.backward(run.mean(lambda _, x, y: F.mse_loss(model(x), teacher(x)), step))
        run.step(optimizer)
    return values(run, model=model)


# Skipped steps and odd orders ------------------------------------------------------------------------


def steps_skipped_on_all_ranks(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(5):
        loss = run.mean(mse(model), step)
        if step == 2:
            continue
        run.backward(loss)
        if step == 3:
            optimizer.zero_grad()
            continue
        run.step(optimizer)
    return values(run, model=model)


def zero_grad_before_backward(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        loss = run.mean(mse(model), step)
        optimizer.zero_grad()
        run.backward(loss)
        optimizer.step()
    return values(run, model=model)


def zero_grad_to_zeros(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return values(run, model=model)


def zero_grad_of_the_model(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        model.zero_grad()
        run.backward(run.mean(mse(model), step))
        optimizer.step()
    return values(run, model=model)


def gradients_of_two_steps_add_up(run: Run) -> Values:
    """zero_grad at every second step only: no accumulate."""
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return values(run, model=model)


def clipped_by_value(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.clip_value(model, 0.01)
        run.step(optimizer)
    return values(run, model=model)


def clipped_by_norm(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.clip(model, 0.1)
        run.step(optimizer)
    return values(run, model=model)


def clipped_by_torch(run: Run) -> Values:
    """torch's function instead of the Accelerator's."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        run.step(optimizer)
    return values(run, model=model)


def evaluated_inside(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        with torch.no_grad():
            run.mean(mse(model), 50 + step)
        run.step(optimizer)
        model.eval()
        run.mean(mse(model), 60 + step)  # with a graph that no backward follows
        model.train()
    return values(run, model=model)


# Gradients and weights by hand -----------------------------------------------------------------------


def norm_of_gradients_by_hand(run: Run) -> Values:
    """Clipping written out: what is read of one gradient must be that of the whole one."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        total = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5
        for p in model.parameters():
            p.grad.mul_(min(1.0, 0.1 / total))
        run.step(optimizer)
    return values(run, model=model)


def gradients_read_for_logging(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    seen = []
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        seen.append([float(p.grad.abs().max()) for p in model.parameters()])
        seen.append([p.grad.norm().item() for p in model.parameters()])
        seen.append([p.grad.mean().item() for p in model.parameters()])
        seen.append([p.detach().norm().item() for p in model.parameters()])
        run.step(optimizer)
    return values(run, model=model) | {"seen": torch.tensor(seen)}


def lr_from_a_gradient(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        weight = run.unwrap(model).head.weight
        if weight.grad.norm() > 1e-3:
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + weight.grad.norm().item())
        run.step(optimizer)
    return values(run, model=model)


def gradient_scaled_by_hand(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        for p in model.parameters():
            p.grad.mul_(0.5).add_(p.detach(), alpha=0.01)
        run.step(optimizer)
    return values(run, model=model)


def noise_on_gradients(run: Run) -> Values:
    """All ranks draw the same."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        torch.manual_seed(step)
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape), alpha=0.01)
        run.step(optimizer)
    return values(run, model=model)


def gradients_masked(run: Run) -> Values:
    """By masks of the whole shape, and of one that is broadcast."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        for p in model.parameters():
            p.grad.mul_((torch.arange(p.numel()).view(p.shape) % 3 > 0).float())
            if p.ndim > 1:
                p.grad.masked_fill_(torch.arange(p.shape[1]) == 1, 0.01)
        run.step(optimizer)
    return values(run, model=model)


def a_penalty_towards_copies(run: Run) -> Values:
    """Elastic weight consolidation: the copies are whole tensors, or shards."""
    model = make(Net)
    before = [p.detach().clone() for p in model.parameters()]
    model, optimizer = run.prepare(model, sgd(model))
    after = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        loss = run.mean(mse(model), step)
        for copies in (before, after):
            pairs = zip(model.parameters(), copies, strict=True)
            loss = loss + 0.1 * sum((p - copy).square().sum() for p, copy in pairs)
        run.backward(loss)
        run.step(optimizer)
    return values(run, model=model)


def noise_like_gradients(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    torch.manual_seed(7)
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
            p.grad.mul_(torch.rand_like(p) < 0.7)
            p.grad.add_(torch.empty_like(p.grad).uniform_(-0.01, 0.01))
        run.step(optimizer)
    return values(run, model=model)


def layers_drawn_anew(run: Run) -> Values:
    """After prepare, by what torch offers for it."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    torch.manual_seed(7)
    for step in range(5):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
        inner = run.unwrap(model)
        if step == 1:
            inner.head.reset_parameters()
        elif step == 2:
            torch.nn.init.trunc_normal_(inner.layers[0].up.weight, std=0.1)
            torch.nn.init.kaiming_normal_(inner.layers[1].up.weight)
        elif step == 3:
            with torch.no_grad():
                for p in inner.layers[2].parameters():
                    p.mul_(torch.bernoulli(torch.full_like(p, 0.5)))
                    p.add_(torch.empty_like(p).exponential_(), alpha=0.01)
    return values(run, model=model)


def regularised_outside(run: Run) -> Values:
    """Terms of weights that are taken before the forward, beside the loss and as a factor of it."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        penalty = sum(p.abs().sum() for name, p in model.named_parameters() if "bias" not in name)
        norm = sum(p.square().sum() for p in model.parameters()).sqrt()
        run.backward(run.mean(mse(model), step) * (1 + 1e-3 * norm) + 1e-4 * penalty)
        run.step(optimizer)
    return values(run, model=model)


def weights_clamped(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
    return values(run, model=model)


def weights_updated_by_hand(run: Run) -> Values:
    model = make(Net)
    model = run.prepare(model)
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
                p.grad = None
    return values(run, model=model)


def decay_by_hand(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
        run.step(optimizer)
    return values(run, model=model)


def a_layer_reinitialised(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        if step == 2:
            torch.manual_seed(3)
            nn.init.zeros_(run.unwrap(model).head.bias)
            nn.init.constant_(run.unwrap(model).head.weight, 0.1)
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def average_of_weights(run: Run) -> Values:
    """EMA in tensors of the loop's own."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    average = {name: p.detach().clone() for name, p in run.unwrap(model).named_parameters()}
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
        with torch.no_grad():
            for name, p in run.unwrap(model).named_parameters():
                average[name].lerp_(p, 0.1)
    with torch.no_grad():
        for name, p in run.unwrap(model).named_parameters():
            p.copy_(average[name])
    return values(run, model=model)


def average_in_a_deepcopy(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    average = copy.deepcopy(run.unwrap(model)).requires_grad_(False)
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), run.unwrap(model).parameters(), strict=True):
                mean.lerp_(p, 0.1)
    out = torch.cat([average(rows(70, rank)[0]) for rank in range(RANKS)])
    return values(run, model=model) | {"out": out}


def average_in_a_copy_from_before(run: Run) -> Values:
    model = make(Net)
    average = copy.deepcopy(model).requires_grad_(False)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), run.unwrap(model).parameters(), strict=True):
                mean.lerp_(p, 0.1)
    return values(run, model=model, average=average)


def torch_averaged_model(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    average = torch.optim.swa_utils.AveragedModel(run.unwrap(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
        average.update_parameters(run.unwrap(model))
    return values(run, model=model, average=average.module)


def parameters_captured_before_prepare(run: Run) -> Values:
    """The list is from before: an optimizer of it is passed to prepare, and the loop clips by it."""
    model = make(Net)
    captured = list(model.parameters())
    model, optimizer = run.prepare(model, sgd(captured))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        if run.is_plain:
            nn.utils.clip_grad_norm_(captured, 0.1)
        else:
            run.accelerator.clip_grad_norm_(captured, 0.1)
        run.step(optimizer)
    return values(run, model=model)


def parameters_captured_and_clamped(run: Run) -> Values:
    model = make(Net)
    captured = list(model.parameters())
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
        for p in captured:
            p.data.clamp_(-0.2, 0.2)
    return values(run, model=model)


def state_dict_reloaded(run: Run) -> Values:
    """A finder of learning rates: train, then go back to what was."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    plain = run.unwrap(model)
    before = {name: value.detach().clone() for name, value in plain.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    for step in range(2):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    plain.load_state_dict(before)
    optimizer.load_state_dict(state)
    for step in range(2):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def whole_state_dict_loaded(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        if step == 2:
            run.unwrap(model).load_state_dict(make(Net, seed=4).state_dict())
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def gradients_set_by_hand(run: Run) -> Values:
    """torch.autograd.grad, and its result as the gradient."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        parameters = list(model.parameters())
        loss = run.mean(mse(model), step)
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
        run.step(optimizer)
    return values(run, model=model)


def gradient_surgery(run: Run) -> Values:
    """PCGrad-like: two gradients, one projected, set by hand after two backward calls."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        first = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        run.backward(run.mean(mse(model), 20 + step))
        for p, g in zip(model.parameters(), first, strict=True):
            p.grad = 0.5 * p.grad + 0.5 * g
        run.step(optimizer)
    return values(run, model=model)


def gradient_penalty(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))

    def loss(_: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_(True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * slope.pow(2).mean()

    for step in range(4):
        run.backward(run.mean(loss, step))
        run.step(optimizer)
    return values(run, model=model)


def plain_backward(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.mean(mse(model), step).backward()
        run.step(optimizer)
    return values(run, model=model)


def plain_and_prepared_backward(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.mean(mse(model), 20 + step).backward()
        run.step(optimizer)
    return values(run, model=model)


def the_bare_module_called(run: Run) -> Values:
    """In some steps what unwrap_model gives is called, not the prepared model."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(6):
        run.backward(run.mean(mse(run.unwrap(model) if step % 2 else model), step))
        run.step(optimizer)
    return values(run, model=model)


def features_of_the_root_alone(run: Run) -> Values:
    """What a hook keeps is all of the loss: nothing comes back through the model's output."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    kept: list[torch.Tensor] = []
    run.unwrap(model).embed.register_forward_hook(lambda module, args, out: kept.append(out))

    def loss(_: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model(x)
        return F.mse_loss(kept.pop(), y)

    for step in range(3):
        run.backward(run.mean(loss, step))
        run.step(optimizer)
    return values(run, model=model)


def stepped_without_a_last_backward(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(3):
        with run.no_sync(model):
            run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def curvature_by_autograd_grad(run: Run) -> Values:
    """A rank's own second derivatives, used beside the averaged gradients."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        parameters = list(model.parameters())
        own = torch.autograd.grad(run.mean(mse(model), step), parameters)
        run.backward(run.mean(mse(model), step))
        for p, g in zip(parameters, own, strict=True):
            p.grad.div_(1 + g.abs())
        run.step(optimizer)
    return values(run, model=model)


def parts_assigned(run: Run) -> Values:
    """Rows, columns and chosen elements of weights and of gradients."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(3):
        run.backward(run.mean(mse(model), step))
        inner = run.unwrap(model)
        inner.head.weight.grad[0] = 0
        inner.embed.weight.grad[2:5] *= 0.1
        inner.head.bias.grad[1] = 1.0
        gradient = inner.layers[0].up.weight.grad
        gradient[gradient.abs() < gradient.abs().mean()] = 0
        run.step(optimizer)
        with torch.no_grad():
            inner.head.weight[1] = inner.head.weight[2:].mean(0)
            inner.embed.weight[:, 1] = 0.5
            inner.layers[1].down.weight[-1, 2] -= 0.25
    return values(run, model=model)


def parts_changed_in_place(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(3):
        run.backward(run.mean(mse(model), step))
        run.unwrap(model).head.weight.grad[0].zero_()
        run.unwrap(model).layers[0].up.weight.data[3:5].mul_(0.5)
        run.step(optimizer)
    return values(run, model=model)


def data_assigned(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(3):
        run.backward(run.mean(mse(model), step))
        for p in model.parameters():
            p.grad.data = p.grad.data.clamp(-0.01, 0.01)
        run.step(optimizer)
        head = run.unwrap(model).head
        head.weight.data = F.normalize(head.weight.data, dim=0)
        head.bias.data = torch.full((WIDTH,), 0.1)
    return values(run, model=model)


def sharpness_by_hand(run: Run) -> Values:
    """SAM in the loop: a scalar parameter is moved by what was computed from sharded ones too."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(3):
        run.backward(run.mean(mse(model), step))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / norm) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        run.backward(run.mean(mse(model), step))
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        run.step(optimizer)
    return values(run, model=model)


# Hooks -----------------------------------------------------------------------------------------------


def _trained(run: Run, model: nn.Module) -> Values:
    """Four steps of the loop that most scripts have."""
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def a_hook_that_scales(run: Run) -> Values:
    model = make(Net)
    model.layers[1].up.weight.register_hook(lambda gradient: gradient * 20)
    model.head.weight.register_hook(lambda gradient: gradient * 20)
    return _trained(run, model)


def a_hook_that_clips(run: Run) -> Values:
    """Hooks set before prepare, and one more after it."""
    model = make(Net)
    for parameter in model.layers[1].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model.head.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))
    model, optimizer = run.prepare(model, sgd(model))
    head = run.unwrap(model).head.weight
    head.register_hook(lambda gradient: gradient.sign() * gradient.square())
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def a_hook_that_clips_in_windows(run: Run) -> Values:
    model = make(Net)
    model.layers[1].up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(8):
        with run.accumulate(model):
            run.backward(run.mean(mse(model), step))
            run.step(optimizer)
    return values(run, model=model)


def hooks_that_look(run: Run) -> Values:
    """As loggers set them, on the main process, before and after prepare."""
    model = make(Net)
    is_main = run.ranks[0] == 0
    seen: list[float] = []
    if is_main:
        model.head.weight.register_hook(lambda gradient: seen.append(gradient.norm().item()))
    model, optimizer = run.prepare(model, sgd(model))
    if is_main:
        for parameter in run.unwrap(model).layers.parameters():
            parameter.register_hook(lambda gradient: seen.append(gradient.mean().item()))
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mean().item()))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def a_hook_set_after_prepare(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    run.unwrap(model).layers[1].up.weight.register_hook(lambda gradient: gradient * 20)
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def averaged_by_hand(run: Run) -> Values:
    """Backwards of ``no_sync`` alone, whose gradients the loop averages itself."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(3):
        with run.no_sync(model):
            run.backward(run.mean(mse(model), step))
        for p in model.parameters() if not run.is_plain else ():
            p.grad = p.grad if p.grad is None else run.accelerator.reduce(p.grad, "mean")
        run.step(optimizer)
    return values(run, model=model)


def twentyfold(parameter: Any) -> None:
    parameter.grad.mul_(20)


def a_post_accumulate_hook(run: Run) -> Values:
    model = make(Net)
    model.layers[1].up.weight.register_post_accumulate_grad_hook(twentyfold)
    return _trained(run, model)


def an_optimizer_in_backward(run: Run) -> Values:
    model = make(Net)

    def update(p: Any) -> None:
        with torch.no_grad():
            p.sub_(0.05 * p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    model = run.prepare(model)
    for step in range(4):
        run.backward(run.mean(mse(model), step))
    return values(run, model=model)


def hooks_of_modules(run: Run) -> Values:
    model = make(Net)
    model.layers[1].register_full_backward_hook(lambda module, before, after: (before[0] * 3,))
    model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
    model.head.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    model.layers[2].up.register_full_backward_pre_hook(lambda module, after: (after[0] * 2,))
    return _trained(run, model)


def hooks_of_modules_after_prepare(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    plain = run.unwrap(model)
    plain.layers[1].register_full_backward_hook(lambda module, before, after: (before[0] * 3,))
    plain.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
    plain.head.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    for step in range(4):
        run.backward(run.mean(mse(model), step))
        run.step(optimizer)
    return values(run, model=model)


def weight_norm(run: Run) -> Values:
    model = make(Net)
    nn.utils.parametrizations.weight_norm(model.layers[0].up)
    nn.utils.parametrizations.weight_norm(model.head)
    return _trained(run, model)


def checkpointed(run: Run) -> Values:
    model = make(Net)
    for layer in model.layers:
        layer.forward = _checkpointed(layer.forward)
    return _trained(run, model)


def _checkpointed(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)


# Windows of several micro-batches --------------------------------------------------------------------


def _windows(run: Run, backward: Callable[[torch.Tensor, int], None]) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(4):
        with run.accumulate(model):
            backward(run.mean(mse(model), step), step)
            run.step(optimizer)
    return values(run, model=model)


def windows(run: Run) -> Values:
    return _windows(run, lambda loss, step: run.backward(loss))


def plain_backward_in_windows(run: Run) -> Values:
    return _windows(run, lambda loss, step: loss.backward())


def heads_in_windows(run: Run) -> Values:
    """Whole windows without a head on any rank, and micro-batches without it on some."""
    model = make(Heads)
    model, optimizer = run.prepare(model, adamw(model))

    def choice(rank: int, step: int) -> str:
        return "head" if step < 2 or (step < 6 and (rank + step) % 2) else "other"

    def loss(step: int) -> Losses:
        return lambda rank, x, y: F.mse_loss(model(x, choice(rank, step)), y)

    for step in range(8):
        with run.accumulate(model):
            run.backward(run.mean(loss(step), step))
            run.step(optimizer)
    return values(run, model=model)


def blocks_skipped_in_windows(run: Run) -> Values:
    model = make(Drops)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(8):
        with run.accumulate(model):
            loss = partial(_choosing, model, lambda rank, step: (step + rank) % 4 - 1, step)
            run.backward(run.mean(loss, step))
            run.step(optimizer)
    return values(run, model=model)


def thawed_between_windows(run: Run) -> Values:
    model = make(Net)
    model.layers[1].requires_grad_(False)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(8):
        if step == 4:
            run.unwrap(model).layers[1].requires_grad_(True)
        with run.accumulate(model):
            run.backward(run.mean(mse(model), step))
            run.step(optimizer)
    return values(run, model=model)


# Frozen between forward and backward ----------------------------------------------------------------


def _frozen_before_backward(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(8):
        with run.accumulate(model):
            loss = run.mean(mse(model), step)
            plain = run.unwrap(model)
            plain.layers[0].requires_grad_(step not in (2, 5))
            plain.head.requires_grad_(step % 3 > 0)
            run.backward(loss)
            run.step(optimizer)
            plain.requires_grad_(True)
    return values(run, model=model)


def frozen_before_backward(run: Run) -> Values:
    return _frozen_before_backward(run)


def frozen_before_backward_in_windows(run: Run) -> Values:
    return _frozen_before_backward(run)


def a_critic_with_a_penalty(run: Run) -> Values:
    """WGAN-GP: the gradient of the critic by its inputs is a part of its loss, outside of the model."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))

    def loss(_: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mixed = (0.3 * y + 0.7 * x).requires_grad_(True)
        (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        return model(x).mean() - model(y).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()

    for step in range(3):
        for part in range(2):
            run.backward(0.1 * run.mean(loss, 10 * step + part))
            run.step(optimizer)
    return values(run, model=model)


# Weights changed by hand while a sharded model has them gathered --------------------------------------


class ClampingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamping(Net):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(ClampingBlock() for _ in range(3))


def weights_clamped_in_forward(run: Run) -> Values:
    model = make(Clamping)
    return _trained(run, model)


def weights_clamped_in_forward_in_windows(run: Run) -> Values:
    model = make(Clamping)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(6):
        with run.accumulate(model):
            run.backward(run.mean(mse(model), step))
            run.step(optimizer)
    return values(run, model=model)


def weights_normalised_by_a_hook(run: Run) -> Values:
    """By a new tensor, which takes the place of the old one."""

    def normalise(module: Any, args: Any) -> None:
        module.up.weight.data = F.normalize(module.up.weight.data, dim=1)

    model = make(Net)
    model.layers[1].register_forward_pre_hook(normalise)
    return _trained(run, model)


class NormalisingHead(nn.Linear):
    """In place and with gradients off, before the weight is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=1))
        return super().forward(x)


def prototypes_normalised_in_forward(run: Run) -> Values:
    model = make(Net)
    model.head = make(NormalisingHead, WIDTH, WIDTH)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        rows_of = [rows(step, rank) for rank in run.ranks]
        x, y = (torch.cat(both) for both in zip(*rows_of, strict=True))
        run.backward(F.mse_loss(model(x), y))
        run.step(optimizer)
    return values(run, model=model)


def weights_changed_before_backward(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(4):
        loss = run.mean(mse(model), step)
        plain = run.unwrap(model)
        plain.head.bias.data.add_(0.1)
        plain.layers[0].down.bias.data.mul_(0.5)
        plain.embed.weight.data[0] = 0
        run.backward(loss)
        run.step(optimizer)
    return values(run, model=model)


def weights_decayed_in_windows(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(6):
        with run.accumulate(model):
            run.backward(run.mean(mse(model), step))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.95)
            run.step(optimizer)
    return values(run, model=model)


def weights_of_the_optimizer_decayed_in_windows(run: Run) -> Values:
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(6):
        with run.accumulate(model):
            run.backward(run.mean(mse(model), step))
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.95)
            run.step(optimizer)
    return values(run, model=model)


class Codebook(Block):
    """Goes with the mean of what it sees, which are this rank's rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.down.bias.data.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


class Codebooks(Net):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Codebook() for _ in range(2))


def weights_that_follow_the_ranks_rows(run: Run) -> Values:
    model = make(Codebooks)
    return _trained(run, model)


def _changed_in_windows(run: Run, change: Callable[[Any], Any]) -> Values:
    """After each micro-batch, where people mean to do it once a step."""
    model = make(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(6):
        with run.accumulate(model):
            run.backward(run.mean(mse(model), step))
            change(model)
            run.step(optimizer)
    return values(run, model=model)


def gradients_scaled_in_windows(run: Run) -> Values:
    def halve(model: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    return _changed_in_windows(run, halve)


def gradients_clipped_in_windows(run: Run) -> Values:
    return _changed_in_windows(run, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def gradients_clipped_by_value_in_windows(run: Run) -> Values:
    return _changed_in_windows(run, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))


def gradients_limited_in_windows(run: Run) -> Values:
    def limit(model: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.clamp_(-0.01, 0.01)

    return _changed_in_windows(run, limit)


def gradients_dropped_in_windows(run: Run) -> Values:
    """Of a micro-batch that came to nothing."""
    model = make(Net)
    model, optimizer = run.prepare(model, adamw(model))
    for step in range(6):
        with run.accumulate(model):
            run.backward(run.mean(mse(model), step))
            if step == 2:
                for parameter in model.parameters():
                    parameter.grad = None
            run.step(optimizer)
    return values(run, model=model)


class Views(Net):
    """A block's output is a view, which the model changes in place."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(ViewBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            h = layer(x)
            h *= 0.5
            h -= 0.1 * x
            x = h
        return (self.head(x) * self.scale)[:, :]


class ViewBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).unsqueeze(1).flatten(1)


def views_changed_in_place(run: Run) -> Values:
    model = make(Views)
    model, optimizer = run.prepare(model, sgd(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of views that a sharded module returns
        for step in range(3):
            run.backward(run.mean(mse(model), step))
            run.step(optimizer)
    return values(run, model=model)


LOOPS: dict[str, Callable[[Run], Values]] = {
    name: loop
    for name, loop in list(globals().items())
    if getattr(loop, "__annotations__", {}).get("return") == "Values" and name[0] != "_" and name != "values"
}
IN_WINDOWS = [name for name in LOOPS if "window" in name]
