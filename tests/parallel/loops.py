"""Training loops that people write. Each runs in plain torch on one process, and prepared on several ranks.

A loop gets a ``Run``: ``Plain`` trains on the rows of all ranks at once and is the oracle, ``Prepared`` on those of its
own rank. It returns what training has changed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass
class Training:
    """What a loop has at hand in a step. ``inner``: what ``unwrap_model`` gives."""

    run: Run
    model: Any
    inner: Any
    optimizer: Any
    step: int = 0

    def loss(self, step: int | None = None, *args: Any) -> torch.Tensor:
        return self.run.mean(mse(self.model, *args), self.step if step is None else step)


Change = Callable[[Training], Any]


def _nothing(now: Training) -> None:
    pass


def _one_loss(now: Training) -> None:
    now.run.backward(now.loss())


def _trained(
    run: Run,
    model: Any = None,
    by: Callable[[Any], torch.optim.Optimizer] = sgd,
    steps: int = 3,
    ready: Change = _nothing,
    learn: Change = _one_loss,
    graded: Change = _nothing,
    stepped: Change = _nothing,
) -> Values:
    """The loop that most scripts have, with what else it does when prepared, before a step and after it."""
    model = make(Net) if model is None else model
    model, optimizer = run.prepare(model, by(model))
    now = Training(run, model, run.unwrap(model), optimizer)
    ready(now)
    for now.step in range(steps):
        with run.accumulate(model) if run.accumulation_steps > 1 else contextlib.nullcontext():
            learn(now)
            graded(now)
            run.step(optimizer)
        stepped(now)
    return values(run, model=model)


def _of_ranks(loss: Callable[[Training, int, torch.Tensor, torch.Tensor], torch.Tensor]) -> Change:
    """One backward of the mean over the ranks."""
    return lambda now: now.run.backward(now.run.mean(partial(loss, now), now.step))


def _choosing(choice: Callable[[int, int], Any]) -> Change:
    """The model is told what this rank chooses in this step."""
    return _of_ranks(lambda now, rank, x, y: F.mse_loss(now.model(x, choice(rank, now.step)), y))


# Several losses --------------------------------------------------------------------------------------


def two_losses_of_one_output(run: Run) -> Values:
    def learn(now: Training) -> None:
        parts = [(now.model(rows(now.step, rank)[0]), rows(now.step, rank)[1]) for rank in run.ranks]
        run.backward(torch.stack([F.mse_loss(out, y) for out, y in parts]).mean(), retain_graph=True)
        run.backward(torch.stack([F.l1_loss(out, y) for out, y in parts]).mean())

    return _trained(run, by=adamw, learn=learn)


def two_forwards_then_two_backwards(run: Run) -> Values:
    def learn(now: Training) -> None:
        first, second = now.loss(), now.loss(10 + now.step)
        run.backward(first)
        run.backward(second)

    return _trained(run, by=adamw, learn=learn)


def heads_in_turn(run: Run) -> Values:
    """All ranks use one head in a step, the other in the next; AdamW must not decay the one at rest."""
    choose = _choosing(lambda rank, step: "head" if step % 3 else "other")
    return _trained(run, make(Heads), adamw, steps=4, learn=choose)


# Branches --------------------------------------------------------------------------------------------


def _branches(run: Run, first: int) -> Values:
    """From step ``first`` on rank 0 uses one head and rank 1 the other; before, all use both."""

    def loss(now: Training, rank: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if now.step >= first:
            return F.mse_loss(now.model(x, "head" if rank == 0 else "other"), y)
        head, other = now.model(x)
        return F.mse_loss(head + other, y)

    return _trained(run, make(Heads), adamw, steps=first + 2, learn=_of_ranks(loss))


def a_head_for_each_rank(run: Run) -> Values:
    return _branches(run, first=0)


def a_head_for_each_rank_from_step_3(run: Run) -> Values:
    return _branches(run, first=3)


class Drops(Net):
    """Whole blocks skipped."""

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            if i != skip:
                x = layer(x)
        return self.head(x) * self.scale


def blocks_skipped_on_one_rank(run: Run) -> Values:
    return _trained(run, make(Drops), adamw, learn=_choosing(lambda rank, step: step % 3 if rank else -1))


# Frozen parts ----------------------------------------------------------------------------------------


def unfrozen_later(run: Run) -> Values:
    model = make(Net)
    model.head.requires_grad_(False)
    model.layers[0].requires_grad_(False)

    def thaw(now: Training) -> None:
        (now.inner.head, now.inner.layers[0])[now.step % 2].requires_grad_(True)

    return _trained(run, model, adamw, steps=4, stepped=thaw)


def parts_frozen_in_turn(run: Run) -> Values:
    def freeze(now: Training) -> None:
        now.inner.layers.requires_grad_(now.step % 2 == 0)
        now.inner.head.requires_grad_(now.step % 2 == 1)

    return _trained(run, by=adamw, steps=5, ready=freeze, stepped=freeze)


def gradual_unfreezing_with_groups(run: Run) -> Values:
    """Groups are added to the optimizer as blocks thaw."""
    model = make(Net).requires_grad_(False)
    model.head.requires_grad_(True)

    def thaw(now: Training) -> None:
        layer = now.inner.layers[2 - now.step]
        layer.requires_grad_(True)
        now.optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.01})

    return _trained(run, model, lambda model: adamw(model.head), stepped=thaw)


def nothing_trained_at_prepare(run: Run) -> Values:
    frozen = make(Net).requires_grad_(False)
    return _trained(run, frozen, adamw, ready=lambda now: now.inner.requires_grad_(True))


def a_head_replaced_after_prepare(run: Run) -> Values:
    def replace(now: Training) -> None:
        if now.step == 1:
            now.inner.head = make(nn.Linear, WIDTH, WIDTH, seed=5)
            now.optimizer.add_param_group({"params": list(now.inner.head.parameters())})

    return _trained(run, stepped=replace)


def weights_tied_after_prepare(run: Run) -> Values:
    return _trained(run, ready=lambda now: setattr(now.inner.head, "weight", now.inner.embed.weight))


# Several models --------------------------------------------------------------------------------------


def gan_with_frozen_critic(run: Run) -> Values:
    """requires_grad is switched in each step, as many scripts do."""
    generator, critic = make(Net), make(Net, 2, seed=1)
    optimizers = adamw(generator), adamw(critic)
    generator, critic, of_generator, of_critic = run.prepare(generator, critic, *optimizers)
    for step in range(3):
        critic.requires_grad_(True)
        run.backward(
            run.mean(lambda _, x, y: critic(generator(x).detach()).mean() + critic(y).pow(2).mean(), step)
        )
        run.step(of_critic)
        critic.requires_grad_(False)
        run.backward(run.mean(lambda _, x, y: -critic(generator(x)).mean(), step))
        run.step(of_generator)
    return values(run, generator=generator, critic=critic)


# Gradients and weights by hand -----------------------------------------------------------------------


def norm_of_gradients_by_hand(run: Run) -> Values:
    """Clipping written out: what is read of one gradient must be that of the whole one."""

    def clip(now: Training) -> None:
        total = sum(p.grad.norm().item() ** 2 for p in now.model.parameters()) ** 0.5
        for p in now.model.parameters():
            p.grad.mul_(min(1.0, 0.1 / total))

    return _trained(run, graded=clip)


def gradients_masked(run: Run) -> Values:
    """By masks of the whole shape, and of one that is broadcast."""

    def mask(now: Training) -> None:
        for p in now.model.parameters():
            p.grad.mul_((torch.arange(p.numel()).view(p.shape) % 3 > 0).float())
            if p.ndim > 1:
                p.grad.masked_fill_(torch.arange(p.shape[1]) == 1, 0.01)

    return _trained(run, graded=mask)


def a_penalty_towards_copies(run: Run) -> Values:
    """Elastic weight consolidation: the copies are whole tensors, or shards."""
    model, copies = make(Net), []

    def keep(parameters: Any) -> None:
        copies.append([p.detach().clone() for p in parameters])

    def learn(now: Training) -> None:
        loss = now.loss()
        for kept in copies:
            pairs = zip(now.model.parameters(), kept, strict=True)
            loss = loss + 0.1 * sum((p - copy).square().sum() for p, copy in pairs)
        run.backward(loss)

    keep(model.parameters())
    return _trained(run, model, ready=lambda now: keep(now.model.parameters()), learn=learn)


def noise_like_gradients(run: Run) -> Values:
    def draw(now: Training) -> None:
        for p in now.model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
            p.grad.mul_(torch.rand_like(p) < 0.7)
            p.grad.add_(torch.empty_like(p.grad).uniform_(-0.01, 0.01))

    return _trained(run, ready=lambda now: torch.manual_seed(7), graded=draw)


def layers_drawn_anew(run: Run) -> Values:
    """After prepare, by what torch offers for it."""

    def draw(now: Training) -> None:
        if now.step == 0:
            now.inner.head.reset_parameters()
        elif now.step == 1:
            torch.nn.init.trunc_normal_(now.inner.layers[0].up.weight, std=0.1)
            torch.nn.init.kaiming_normal_(now.inner.layers[1].up.weight)
        else:
            with torch.no_grad():
                for p in now.inner.layers[2].parameters():
                    p.mul_(torch.bernoulli(torch.full_like(p, 0.5)))
                    p.add_(torch.empty_like(p).exponential_(), alpha=0.01)

    return _trained(run, steps=4, ready=lambda now: torch.manual_seed(7), stepped=draw)


def regularised_outside(run: Run) -> Values:
    """Terms of weights that are taken before the forward, beside the loss and as a factor of it."""

    def learn(now: Training) -> None:
        penalty = sum(p.abs().sum() for name, p in now.model.named_parameters() if "bias" not in name)
        norm = sum(p.square().sum() for p in now.model.parameters()).sqrt()
        run.backward(now.loss() * (1 + 1e-3 * norm) + 1e-4 * penalty)

    return _trained(run, learn=learn)


def weights_updated_by_hand(run: Run) -> Values:
    model = run.prepare(make(Net))
    for step in range(3):
        run.backward(run.mean(mse(model), step))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
                p.grad = None
    return values(run, model=model)


def parameters_captured_before_prepare(run: Run) -> Values:
    """The list is from before: an optimizer of it is passed to prepare, and the loop clips by it."""
    model = make(Net)
    captured = list(model.parameters())

    def clip(now: Training) -> None:
        if run.is_plain:
            nn.utils.clip_grad_norm_(captured, 0.1)
        else:
            run.accelerator.clip_grad_norm_(captured, 0.1)

    return _trained(run, model, lambda _: sgd(captured), graded=clip)


def parameters_captured_and_clamped(run: Run) -> Values:
    model = make(Net)
    captured = list(model.parameters())
    return _trained(run, model, stepped=lambda now: [p.data.clamp_(-0.2, 0.2) for p in captured])


def gradients_set_by_hand(run: Run) -> Values:
    """torch.autograd.grad, and its result as the gradient."""

    def learn(now: Training) -> None:
        parameters = list(now.model.parameters())
        for p, g in zip(parameters, torch.autograd.grad(now.loss(), parameters), strict=True):
            p.grad = g

    return _trained(run, learn=learn)


def gradient_penalty(run: Run) -> Values:
    def loss(now: Training, _: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_(True)
        out = now.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * slope.pow(2).mean()

    return _trained(run, learn=_of_ranks(loss))


def a_critic_with_a_penalty(run: Run) -> Values:
    """WGAN-GP: the gradient of the critic by its inputs is a part of its loss, outside of the model."""

    def loss(now: Training, _: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mixed = (0.3 * y + 0.7 * x).requires_grad_(True)
        (slope,) = torch.autograd.grad(now.model(mixed).sum(), mixed, create_graph=True)
        outputs = now.model(x).mean() - now.model(y).mean()
        return 0.1 * (outputs + 10 * (slope.norm(dim=1) - 1).pow(2).mean())

    return _trained(run, learn=_of_ranks(loss))


def plain_and_prepared_backward(run: Run) -> Values:
    def learn(now: Training) -> None:
        run.backward(now.loss())
        now.loss(20 + now.step).backward()

    return _trained(run, learn=learn)


def the_bare_module_called(run: Run) -> Values:
    """In some steps what unwrap_model gives is called, not the prepared model."""

    def learn(now: Training) -> None:
        run.backward(run.mean(mse(now.inner if now.step % 2 else now.model), now.step))

    return _trained(run, steps=4, learn=learn)


def features_of_the_root_alone(run: Run) -> Values:
    """What a hook keeps is all of the loss: nothing comes back through the model's output."""
    kept: list[torch.Tensor] = []

    def loss(now: Training, _: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        now.model(x)
        return F.mse_loss(kept.pop(), y)

    def keep(now: Training) -> None:
        now.inner.embed.register_forward_hook(lambda module, args, out: kept.append(out))

    return _trained(run, ready=keep, learn=_of_ranks(loss))


def _without_averaging(now: Training) -> None:
    with now.run.no_sync(now.model):
        _one_loss(now)


def stepped_without_a_last_backward(run: Run) -> Values:
    return _trained(run, learn=_without_averaging)


def averaged_by_hand(run: Run) -> Values:
    """Backwards of ``no_sync`` alone, whose gradients the loop averages itself."""

    def average(now: Training) -> None:
        for p in now.model.parameters() if not run.is_plain else ():
            p.grad = p.grad if p.grad is None else run.accelerator.reduce(p.grad, "mean")

    return _trained(run, learn=_without_averaging, graded=average)


def curvature_by_autograd_grad(run: Run) -> Values:
    """A rank's own second derivatives, used beside the averaged gradients."""

    def learn(now: Training) -> None:
        parameters = list(now.model.parameters())
        own = torch.autograd.grad(now.loss(), parameters)
        run.backward(now.loss())
        for p, g in zip(parameters, own, strict=True):
            p.grad.div_(1 + g.abs())

    return _trained(run, learn=learn)


def parts_assigned(run: Run) -> Values:
    """Rows, columns and chosen elements of weights and of gradients."""

    def of_gradients(now: Training) -> None:
        now.inner.head.weight.grad[0] = 0
        now.inner.embed.weight.grad[2:5] *= 0.1
        gradient = now.inner.layers[0].up.weight.grad
        gradient[gradient.abs() < gradient.abs().mean()] = 0

    def of_weights(now: Training) -> None:
        with torch.no_grad():
            now.inner.head.weight[1] = now.inner.head.weight[2:].mean(0)
            now.inner.embed.weight[:, 1] = 0.5
            now.inner.layers[1].down.weight[-1, 2] -= 0.25

    return _trained(run, graded=of_gradients, stepped=of_weights)


def parts_changed_in_place(run: Run) -> Values:
    def change(now: Training) -> None:
        now.inner.head.weight.grad[0].zero_()
        now.inner.layers[0].up.weight.data[3:5].mul_(0.5)

    return _trained(run, graded=change)


def data_assigned(run: Run) -> Values:
    def of_gradients(now: Training) -> None:
        for p in now.model.parameters():
            p.grad.data = p.grad.data.clamp(-0.01, 0.01)

    def of_weights(now: Training) -> None:
        now.inner.head.weight.data = F.normalize(now.inner.head.weight.data, dim=0)
        now.inner.head.bias.data = torch.full((WIDTH,), 0.1)

    return _trained(run, graded=of_gradients, stepped=of_weights)


def averages_swapped_in_by_data(run: Run) -> Values:
    """As most copies of a class EMA do it: the backup is no copy, and the weights get other memory."""
    shadow: dict[str, torch.Tensor] = {}

    def follow(now: Training) -> None:
        backup = {}
        for name, p in now.model.named_parameters():
            shadow[name] = (0.5 * p.data + 0.5 * shadow.get(name, p.data)).clone()
            backup[name], p.data = p.data, shadow[name]
        with torch.no_grad():
            now.loss()
        for name, p in now.model.named_parameters():
            p.data = backup[name]

    return _trained(run, stepped=follow)


def a_step_undone_by_data(run: Run) -> Values:
    def change(now: Training) -> None:
        before = [(p, p.data if now.step else p.detach()) for p in now.model.parameters()]
        for p, kept in before:
            p.data = p.data + 0.1
            # What was kept has its values still; a scalar, and what is changed in its own memory, as well.
            p.data = kept if now.step < 2 else kept.mul_(0.5)

    return _trained(run, stepped=change)


def weights_tied_by_data_after_prepare(run: Run) -> Values:
    def tie(now: Training) -> None:
        now.inner.head.weight.data = now.inner.embed.weight.data

    return _trained(run, ready=tie)


def sharpness_by_hand(run: Run) -> Values:
    """SAM in the loop: a scalar parameter is moved by what was computed from sharded ones too."""

    def learn(now: Training) -> None:
        run.backward(now.loss())
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in now.model.parameters()]).norm()
            moves = [p.grad * (0.05 / norm) for p in now.model.parameters()]
            for p, move in zip(now.model.parameters(), moves, strict=True):
                p.add_(move)
        now.optimizer.zero_grad()
        run.backward(now.loss())
        with torch.no_grad():
            for p, move in zip(now.model.parameters(), moves, strict=True):
                p.sub_(move)

    return _trained(run, learn=learn)


# Hooks -----------------------------------------------------------------------------------------------


def a_hook_that_clips(run: Run) -> Values:
    """Hooks set before prepare, and one more after it."""
    model = make(Net)
    for parameter in model.layers[1].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def hook(now: Training) -> None:
        now.inner.head.weight.register_hook(lambda gradient: gradient.sign() * gradient.square())

    return _trained(run, model, ready=hook)


def a_hook_that_clips_in_windows(run: Run) -> Values:
    model = make(Net)
    model.layers[1].up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return _trained(run, model, adamw, steps=6)


def hooks_that_look(run: Run) -> Values:
    """As loggers set them, on the main process, before and after prepare."""
    model = make(Net)
    is_main = run.ranks[0] == 0
    seen: list[float] = []
    if is_main:
        model.head.weight.register_hook(lambda gradient: seen.append(gradient.norm().item()))

    def hook(now: Training) -> None:
        for parameter in now.inner.layers.parameters() if is_main else ():
            parameter.register_hook(lambda gradient: seen.append(gradient.mean().item()))
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mean().item()))

    return _trained(run, model, ready=hook)


def twentyfold(parameter: Any) -> None:
    parameter.grad.mul_(20)


def a_post_accumulate_hook(run: Run) -> Values:
    model = make(Net)
    model.layers[1].up.weight.register_post_accumulate_grad_hook(twentyfold)
    return _trained(run, model)


def hooks_of_modules(run: Run) -> Values:
    model = make(Net)
    model.layers[1].register_full_backward_hook(lambda module, before, after: (before[0] * 3,))
    model.layers[2].up.register_full_backward_pre_hook(lambda module, after: (after[0] * 2,))

    def hook(now: Training) -> None:
        now.inner.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
        now.inner.head.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))

    return _trained(run, model, ready=hook)


# Windows of several micro-batches --------------------------------------------------------------------


def plain_backward_in_windows(run: Run) -> Values:
    return _trained(run, by=adamw, steps=4, learn=lambda now: now.loss().backward())


def heads_in_windows(run: Run) -> Values:
    """Whole windows without a head on any rank, and micro-batches without it on some."""

    def choice(rank: int, step: int) -> str:
        return "head" if step < 2 or (step < 6 and (rank + step) % 2) else "other"

    return _trained(run, make(Heads), adamw, steps=8, learn=_choosing(choice))


def blocks_skipped_in_windows(run: Run) -> Values:
    choose = _choosing(lambda rank, step: (step + rank) % 4 - 1)
    return _trained(run, make(Drops), adamw, steps=8, learn=choose)


def frozen_before_backward(run: Run) -> Values:
    def learn(now: Training) -> None:
        loss = now.loss()
        now.inner.layers[0].requires_grad_(now.step not in (2, 5))
        now.inner.head.requires_grad_(now.step % 3 > 0)
        run.backward(loss)

    return _trained(run, by=adamw, steps=6, learn=learn, stepped=lambda now: now.inner.requires_grad_(True))


# Weights changed by hand while a sharded model has them gathered --------------------------------------


class ClampingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamping(Net):
    def __init__(self, kind: Callable[[], nn.Module] = ClampingBlock) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(kind() for _ in range(3))


def weights_clamped_in_forward(run: Run) -> Values:
    return _trained(run, make(Clamping))


class NormalisingHead(nn.Linear):
    """In place and with gradients off, before the weight is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=1))
        return super().forward(x)


def prototypes_normalised_in_forward(run: Run) -> Values:
    model = make(Net)
    model.head = make(NormalisingHead, WIDTH, WIDTH)

    def learn(now: Training) -> None:
        rows_of = [rows(now.step, rank) for rank in run.ranks]
        x, y = (torch.cat(both) for both in zip(*rows_of, strict=True))
        run.backward(F.mse_loss(now.model(x), y))

    return _trained(run, model, learn=learn)


def weights_changed_before_backward(run: Run) -> Values:
    def learn(now: Training) -> None:
        loss = now.loss()
        now.inner.head.bias.data.add_(0.1)
        now.inner.embed.weight.data[0] = 0
        run.backward(loss)

    return _trained(run, learn=learn)


def weights_decayed_in_windows(run: Run) -> Values:
    def decay(now: Training) -> None:
        with torch.no_grad():
            for parameter in now.model.parameters():
                parameter.mul_(0.95)

    return _trained(run, steps=4, graded=decay)


class Codebook(Block):
    """Goes with the mean of what it sees, which are this rank's rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.down.bias.data.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


def weights_that_follow_the_ranks_rows(run: Run) -> Values:
    return _trained(run, make(Clamping, Codebook))


def gradients_clipped_in_windows(run: Run) -> Values:
    """After each micro-batch, where people mean to do it once a step."""
    return _trained(run, steps=4, graded=lambda now: nn.utils.clip_grad_norm_(now.model.parameters(), 0.1))


def gradients_limited_in_windows(run: Run) -> Values:
    def limit(now: Training) -> None:
        for parameter in now.model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.clamp_(-0.01, 0.01)

    return _trained(run, steps=4, graded=limit)


def gradients_dropped_in_windows(run: Run) -> Values:
    """Of a micro-batch that came to nothing."""

    def drop(now: Training) -> None:
        if now.step == 2:
            for parameter in now.model.parameters():
                parameter.grad = None

    return _trained(run, by=adamw, steps=6, graded=drop)


class ViewBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).unsqueeze(1).flatten(1)


class Views(Clamping):
    """A block's output is a view, which the model changes in place."""

    def __init__(self) -> None:
        super().__init__(ViewBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            h = layer(x)
            h *= 0.5
            h -= 0.1 * x
            x = h
        return (self.head(x) * self.scale)[:, :]


def views_changed_in_place(run: Run) -> Values:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of views that a sharded module returns
        return _trained(run, make(Views))


LOOPS: dict[str, Callable[[Run], Values]] = {
    name: loop
    for name, loop in list(globals().items())
    if getattr(loop, "__annotations__", {}).get("return") == "Values" and name[0] != "_" and name != "values"
}
IN_WINDOWS = [name for name in LOOPS if "window" in name]
