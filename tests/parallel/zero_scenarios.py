"""Training scripts of many kinds, each written once: for an ``Accelerator`` and, as the oracle, for plain torch.

A scenario takes an accelerator and returns named tensors and numbers.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 6


class Plain:
    """The calls that scenarios make, in plain torch on one process."""

    process_index, num_processes, sync_gradients = 0, 1, True

    def __init__(self, accumulation: int = 1) -> None:
        self.gradient_accumulation_steps = accumulation
        self._count = 0

    def prepare(self, *objects: Any) -> Any:
        return objects if len(objects) > 1 else objects[0]

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        (loss / self.gradient_accumulation_steps).backward(**options)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        self._count += 1
        self.sync_gradients = self._count % self.gradient_accumulation_steps == 0
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        nn.utils.clip_grad_value_(parameters, clip_value)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 5)
        self.down = nn.Linear(5, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, inputs: int = WIDTH, outputs: int = 3, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.last = nn.Linear(WIDTH, outputs)

    def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            if i != skip:
                x = layer(x)
        return self.last(x)


def seeded(make: Any, *args: Any, seed: int = 0, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(*args, **options)


def batch(run: Any, step: int, width: int = WIDTH, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows and labels of a global batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, width, generator=generator)
    y = torch.randint(0, 3, (rows,), generator=generator)
    rank, ranks = run.process_index, run.num_processes
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def loss_of(run: Any, model: nn.Module, step: int, **options: Any) -> torch.Tensor:
    x, y = batch(run, step)
    return F.cross_entropy(model(x, **options), y)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def step_and_clear(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def learn(run: Any, optimizer: Any, loss: torch.Tensor) -> None:
    """A step without accumulation."""
    run.backward(loss)
    step_and_clear(optimizer)


def clip_and_step(run: Any, model: nn.Module, optimizer: Any) -> torch.Tensor:
    """The end of a window; the norm of its gradients."""
    norm = run.clip_grad_norm_(model.parameters(), 0.5)
    step_and_clear(optimizer)
    return norm


def rank_tokens(run: Any, step: int, low: int, high: int) -> torch.Tensor:
    """This rank's rows of a global batch of tokens."""
    tokens = torch.randint(low, high, (8, 6), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(run.num_processes)[run.process_index]


def values(**models: nn.Module) -> dict[str, torch.Tensor]:
    """The whole tensors of all models' state."""
    return {
        f"{key}.{name}": (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        for key, model in models.items()
        for name, tensor in model.state_dict().items()
    }


def gradients_of(**models: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{name}.grad": (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for key, model in models.items()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


# -- several models and optimizers -----------------------------------------------------------------------


def adversaries(run: Any) -> dict[str, Any]:
    """Generator and discriminator in turn; the generator's loss goes through the discriminator."""
    make, judge = seeded(Net, 4, 6), seeded(Net, 6, 1, seed=1)
    make_step, judge_step = sgd(make), sgd(judge, 0.05)
    make, judge, make_step, judge_step = run.prepare(make, judge, make_step, judge_step)
    for step in range(4 * run.gradient_accumulation_steps):
        with run.accumulate(make, judge):
            noise, real = batch(run, step, 4)[0], batch(run, step + 100)[0]
            fake = make(noise)
            run.backward(F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean())
            if run.sync_gradients:
                step_and_clear(judge_step)
            judge.requires_grad_(False)
            run.backward(F.softplus(-judge(fake)).mean())
            judge.requires_grad_(True)
            if run.sync_gradients:
                step_and_clear(make_step)
    return values(make=make, judge=judge)


def frozen_teacher(run: Any) -> dict[str, Any]:
    """A frozen prepared teacher, whose weights follow the student's."""
    student, teacher = seeded(Net), seeded(Net, seed=1).requires_grad_(False).eval()
    optimizer = sgd(student)
    student, teacher, optimizer = run.prepare(student, teacher, optimizer)
    for step in range(4):
        x, _ = batch(run, step)
        with torch.no_grad():
            target = teacher(x)
        learn(run, optimizer, F.mse_loss(student(x), target))
        with torch.no_grad():
            teacher(x)  # someone looks at it before its weights change
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
    return values(student=student, teacher=teacher)


def two_optimizers(run: Any) -> dict[str, Any]:
    """One model, whose matrices and vectors have an optimizer each."""
    model = seeded(Net)
    first = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1)
    second = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.05, momentum=0.5)
    model, first, second = run.prepare(model, first, second)
    for step in range(4 * run.gradient_accumulation_steps):
        with run.accumulate(model):
            run.backward(loss_of(run, model, step))
            if run.sync_gradients:
                for optimizer in (first, second):
                    step_and_clear(optimizer)
    return values(model=model)


# -- evaluation between steps ----------------------------------------------------------------------------


def evaluation_everywhere(run: Any) -> dict[str, Any]:
    """Before the first step, between backward and step, inside windows; each sees the weights of its moment."""
    model = seeded(Net)
    model, optimizer = run.prepare(model, sgd(model))
    fixed = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    seen = {}

    def evaluate(key: str) -> None:
        model.eval()
        with torch.no_grad():
            seen[f"{key} no_grad"] = model(fixed).clone()
        with torch.inference_mode():
            seen[f"{key} inference"] = model(fixed).clone()
        seen[f"{key} graph"] = model(fixed).detach().clone()
        model.train()

    evaluate("start")
    for step in range(3 * run.gradient_accumulation_steps):
        with run.accumulate(model):
            loss = loss_of(run, model, step)
            evaluate(f"{step} before backward")
            run.backward(loss)
            evaluate(f"{step} after backward")
            if run.sync_gradients:
                norm = run.clip_grad_norm_(model.parameters(), 0.1)
                seen[f"{step} norm"] = norm
                evaluate(f"{step} after clipping")
                optimizer.step()
                evaluate(f"{step} after step")
                optimizer.zero_grad()
    return seen | values(model=model)


def changed_by_hand(run: Any) -> dict[str, Any]:
    """Weights clamped and loaded between calls without a step."""
    model = seeded(Net)
    model, optimizer = run.prepare(model, sgd(model))
    seen = {}
    for step in range(3):
        x, y = batch(run, step)
        with torch.no_grad():
            model(x)
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
            fixed = torch.ones(1, WIDTH)
            seen[f"{step} clamped"] = model(fixed).clone()
            before = copy.deepcopy({k: v.clone() for k, v in model.state_dict().items()})
            for parameter in model.parameters():
                parameter.zero_()
            seen[f"{step} zeroed"] = model(fixed).clone()
            model.load_state_dict(before)
            seen[f"{step} loaded"] = model(fixed).clone()
        learn(run, optimizer, F.cross_entropy(model(x), y))
    return seen | values(model=model)


# -- windows by hand -------------------------------------------------------------------------------------


def forgotten_gradients(run: Any) -> dict[str, Any]:
    """``zero_grad`` after a backward that was not averaged; gradients as zeros instead of None."""
    model = seeded(Net)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(3):
        with run.no_sync(model):
            run.backward(loss_of(run, model, step + 70))
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return values(model=model)


class Scaled(Net):
    """With a parameter that every rank holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        return super().forward(x, skip) * self.scale


def one_of_two_in_no_sync(run: Any) -> dict[str, Any]:
    """A backward through two models, only one of which waits with averaging."""
    waits, goes = seeded(Scaled), seeded(Scaled, seed=1)
    waits_step, goes_step = sgd(waits), sgd(goes)
    waits, goes, waits_step, goes_step = run.prepare(waits, goes, waits_step, goes_step)
    for step in range(0, 6, 2):
        with run.no_sync(waits):
            run.backward(loss_of(run, waits, step) + loss_of(run, goes, step))
        step_and_clear(goes_step)
        run.backward(loss_of(run, waits, step + 1))
        step_and_clear(waits_step)
    return values(waits=waits, goes=goes)


def loaded_between_forward_and_backward(run: Any) -> dict[str, Any]:
    """Whole tensors, while a stage has gathered parameters."""
    model = seeded(Scaled)
    model, optimizer = run.prepare(model, sgd(model))
    for step in range(3):
        loss_of(run, model, step + 40)  # nobody calls backward
        if step == 1:
            model.load_state_dict(seeded(Scaled, seed=5).state_dict())
        learn(run, optimizer, loss_of(run, model, step))
    return values(model=model)


def interrupted(run: Any) -> dict[str, Any]:
    """An exception in a forward and one in a backward, after which the script goes on with the next batch."""
    model = seeded(Scaled)
    model, optimizer = run.prepare(model, sgd(model))

    def fail(*_: Any) -> None:
        raise FloatingPointError

    def attempt(step: int) -> None:
        run.backward(loss_of(run, model, step))
        optimizer.step()

    layer = model.layers[1]
    for step in range(6):
        handles = []
        if step in (1, 4):
            handles = [layer.norm.register_forward_pre_hook(fail)]
        if step in (2, 4):
            handles.append(layer.norm.register_full_backward_hook(fail))
        try:
            attempt(step)
        except FloatingPointError:
            assert handles
        else:
            assert not handles
        for handle in handles:
            handle.remove()
        optimizer.zero_grad()
    return values(model=model)


# -- clipping --------------------------------------------------------------------------------------------


def clipping(run: Any) -> dict[str, Any]:
    model = seeded(Net)
    model, optimizer = run.prepare(model, sgd(model))
    seen = {}
    for step, norm_type in enumerate((2.0, 1.0, float("inf"), 3.0)):
        run.backward(loss_of(run, model, step))
        seen[f"{norm_type} a part"] = run.clip_grad_norm_(model.layers.parameters(), 0.05, norm_type)
        seen[f"{norm_type} one"] = run.clip_grad_norm_(model.first.weight, 0.02, norm_type)
        groups = [p for group in optimizer.param_groups for p in group["params"]]
        seen[f"{norm_type} all"] = run.clip_grad_norm_(groups, 0.04, norm_type)
        run.clip_grad_value_(model.parameters(), 0.004)
        seen |= {f"{norm_type} {name}": g for name, g in gradients_of(model=model).items()}
        step_and_clear(optimizer)
    return seen | values(model=model)


# -- models ----------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Shapes that nothing divides, scalars, empty and frozen parameters of other types, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5, padding_idx=2)
        self.conv = nn.Conv1d(5, 3, 3, padding=1)
        self.layers = nn.ModuleList(Block(3) for _ in range(2))
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.none = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.randn(1, 4))
        self.cube = nn.Parameter(torch.randn(3, 1, 1, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor(-0.2))
        self.frozen_scale = nn.Parameter(torch.tensor(1.3), requires_grad=False)
        self.table = nn.Parameter(torch.arange(7), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("offset", torch.randn(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.words(self.table[tokens]).mT).mT
        for layer in self.layers:
            x = layer(x) * self.phase.abs()
        x = torch.cat([x.flatten(0, 1), self.none]) @ self.turned
        x = x * self.one * self.scale + self.shift * self.frozen_scale + self.cube.sum((0, 1, 2))
        return (x + self.offset) * self.mask


def odd_shapes(run: Any) -> dict[str, Any]:
    model = seeded(Odd)
    model, optimizer = run.prepare(model, sgd(model))
    seen: dict[str, Any] = {}
    for step in range(3 * run.gradient_accumulation_steps):
        tokens = rank_tokens(run, step, 0, 7)
        with run.accumulate(model):
            run.backward(model(tokens).pow(2).mean())
            if run.sync_gradients:
                seen["norm"] = clip_and_step(run, model, optimizer)
    return seen | values(model=model)


class Shared(nn.Module):
    """A weight that two blocks share, and a block that is applied three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[2].up.weight = self.layers[0].up.weight
        again = Block()
        self.repeated = nn.ModuleList([again, again, again])
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.repeated):
            x = layer(x)
        return self.last(x)


class LowRank(nn.Module):
    """A frozen layer and a small trained product beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


MODELS: dict[str, Any] = {
    "shared": Shared,
    "low rank": lambda: nn.Sequential(*(LowRank() for _ in range(3)), nn.Linear(WIDTH, 3)),
    "no blocks": NoBlocks,
    "linear": lambda: nn.Linear(WIDTH, 3),
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3)),
    "scalars only": lambda: nn.Sequential(nn.Flatten(), ScalarsOnly()),
    "repeated": lambda: nn.Sequential(*[Block()] * 3),
}


class ScalarsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.a + self.b)


def kinds_of_models(run: Any) -> dict[str, Any]:
    seen = {}
    for name, make in MODELS.items():
        model = seeded(make)
        model, optimizer = run.prepare(model, sgd(model))
        for step in range(2 * run.gradient_accumulation_steps):
            with run.accumulate(model):
                run.backward(loss_of(run, model, step))
                if run.sync_gradients:
                    seen[f"{name} norm {step}"] = clip_and_step(run, model, optimizer)
        seen |= values(**{name: model})
    return seen


def nothing_to_train(run: Any) -> dict[str, Any]:
    """Prepared models that have no trainable parameters, or none at all, around one that has."""
    model = seeded(Net)
    frozen, bare = seeded(Net, WIDTH, WIDTH, seed=1).requires_grad_(False), nn.Tanh()
    model, optimizer, frozen, bare = run.prepare(model, sgd(model), frozen, bare)
    for step in range(3):
        x, y = batch(run, step)
        learn(run, optimizer, F.cross_entropy(model(bare(frozen(x))), y))
    return values(model=model, frozen=frozen)


SCENARIOS = {
    function.__name__: function
    for function in (
        adversaries,
        frozen_teacher,
        two_optimizers,
        evaluation_everywhere,
        changed_by_hand,
        forgotten_gradients,
        one_of_two_in_no_sync,
        loaded_between_forward_and_backward,
        interrupted,
        clipping,
        odd_shapes,
        kinds_of_models,
        nothing_to_train,
    )
}
