"""Averages of weights as libraries keep them, made before ``prepare`` or after it, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel.plain import full as whole

Values = list[torch.Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


class Shadow:
    """An average of parameters, as diffusers keeps it."""

    def __init__(self, parameters: Any, foreach: bool) -> None:
        self.shadow = [p.clone().detach() for p in parameters]
        self.foreach = foreach
        self.stored: Values = []

    @torch.no_grad()
    def update(self, parameters: Any) -> None:
        parameters = list(parameters)
        if self.foreach:
            torch._foreach_sub_(self.shadow, torch._foreach_sub(self.shadow, parameters), alpha=0.3)
        else:
            for mean, parameter in zip(self.shadow, parameters, strict=True):
                mean.sub_(0.3 * (mean - parameter))

    def swap_in(self, parameters: Any) -> None:
        parameters = list(parameters)
        self.stored = [p.detach().cpu().clone() for p in parameters]
        if self.foreach:
            torch._foreach_copy_([p.data for p in parameters], [mean.data for mean in self.shadow])
        else:
            for mean, parameter in zip(self.shadow, parameters, strict=True):
                parameter.data.copy_(mean.to(parameter.device).data)

    def swap_out(self, parameters: Any) -> None:
        for stored, parameter in zip(self.stored, parameters, strict=True):
            parameter.data.copy_(stored.data)


def averaged(**options: Any) -> Callable[[nn.Module], swa_utils.AveragedModel]:
    return lambda model: swa_utils.AveragedModel(model, **options)


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "AveragedModel": averaged(),
    "AveragedModel, ema": averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7)),
    "AveragedModel, ema of each": averaged(avg_fn=swa_utils.get_ema_avg_fn(0.7)),
    "AveragedModel, buffers": averaged(
        use_buffers=True, avg_fn=lambda mean, new, n: mean + (new - mean) / (n + 1)
    ),
    "shadow": lambda model: Shadow(model.parameters(), foreach=False),
    "shadow, foreach": lambda model: Shadow(model.parameters(), foreach=True),
}


def train(
    model: Any, optimizer: Any, average: Any, shares: list[torch.Tensor], backward: Any
) -> list[Values]:
    """Weights of the average, outputs with them, and weights of the model, which trains on in the end."""
    outputs: Values = []
    for step in range(4):
        if step == 3 and isinstance(average, Shadow):
            average.swap_in(model.parameters())
            model.eval()
            outputs = [model(torch.ones(2, 6)).detach()]
            model.train()
            average.swap_out(model.parameters())
        backward(sum(model(share + step).square().mean() for share in shares) / len(shares))
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(average, Shadow):
            average.update(model.parameters())
        else:
            average.update_parameters(model)
    if not isinstance(average, Shadow):
        average.eval()
        outputs = [average(torch.ones(2, 6)).detach()]
    means = average.shadow if isinstance(average, Shadow) else average.module.parameters()
    return [
        [whole(mean.detach()) for mean in means],
        outputs,
        [whole(p.detach()) for p in model.parameters()],
    ]


def problems(stage: int) -> list[str]:
    found = []
    accelerator = Accelerator(cpu=True, parallel=f"zero={stage} blocks=Linear")
    share = torch.linspace(-1, 1, 24).view(4, 6)
    for name, make in KINDS.items():
        for early in (True, False):
            plain = net()
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            expected = train(plain, optimizer, make(plain), [share], lambda loss: loss.backward())
            model = net()
            average = make(model) if early else None
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            try:
                average = make(model) if average is None else average
            except UsageError as error:
                if not (name.startswith("AveragedModel") and "copy.deepcopy" in str(error)):
                    raise
                accelerator.free_memory()
                continue
            # all ranks train on the same rows, whose mean gradient is that of one of them
            results = train(model, optimizer, average, [share], accelerator.backward)
            for what, ours, theirs in zip(("average", "output", "weights"), results, expected, strict=True):
                if not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True)):
                    found.append(f"{name}, {'before' if early else 'after'} prepare: {what}")
            accelerator.free_memory()
    return found


def on_another_mesh() -> list[str]:
    """A teacher that another library has sharded by itself is the average that whole models have."""
    from torch.distributed.fsdp import fully_shard

    model, teacher, plain, plain_teacher = net(), net(), net(), net()
    with torch.no_grad():
        for one in (model, plain):
            for number, parameter in enumerate(one.parameters()):
                parameter.add_(number)
    model = Accelerator(cpu=True, parallel="zero=3").prepare(model)
    fully_shard(teacher)
    found = []
    for means, values in ((teacher, model), (plain_teacher, plain)):
        for mean, value in zip(means.parameters(), values.parameters(), strict=True):
            mean.data.mul_(0.9).add_(value.data, alpha=0.1)
            mean.data.lerp_(value.data, 0.5)
    for (name, mean), expected in zip(teacher.named_parameters(), plain_teacher.parameters(), strict=True):
        if not torch.allclose(mean.full_tensor(), expected, rtol=1e-6):  # type: ignore[attr-defined]
            found.append(name)
    for mean, value in zip(teacher.parameters(), model.parameters(), strict=True):
        mean.data.copy_(value.data)
        if not torch.equal(mean.full_tensor(), value.full_tensor()):  # type: ignore[attr-defined]
            found.append("copied")
    return found
