"""The oracle of ZeRO's mixed precision: fp32 master weights, cast copies and autocast, in plain torch, one process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.func import functional_call

from parallel import zero_problem as problem

STEPS = 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Result:
    """Per step: loss, norm of gradients, whether it was skipped, the scale after it. Gradients of the last."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Policy:
    """``reduce``: the type in which ranks are averaged. ``whole_window``: micro-batches are added up before that."""

    compute: torch.dtype
    reduce: torch.dtype
    whole_window: bool
    ranks: int


def micro_gradients(
    masters: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], policy: Policy, factor: float
) -> tuple[float, list[dict[str, torch.Tensor]]]:
    """The loss of a global micro-batch, and each rank's gradients of ``factor`` times its own loss.

    Scalar parameters are not cast.
    """
    total, found = 0.0, []
    parts = zip(*(tensor.chunk(policy.ranks) for tensor in batch), strict=True)
    for tokens, labels in parts:
        copies = {
            name: p.detach().to(policy.compute if p.ndim else p.dtype).requires_grad_(p.requires_grad)
            for name, p in masters.named_parameters()
        }
        with torch.autocast("cpu", policy.compute, enabled=policy.compute != torch.float32):
            logits = functional_call(masters, copies, (tokens,))
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        (loss * factor).backward()
        total += loss.item() / policy.ranks
        found.append({name: copy.grad for name, copy in copies.items() if copy.grad is not None})
    return total, found


def average(gradients: list[torch.Tensor], reduce: torch.dtype) -> torch.Tensor:
    """The mean over ranks in the type ``reduce``, as fp32; of scalars in double."""
    reduce = reduce if gradients[0].ndim else torch.float64
    total = gradients[0].to(reduce)
    for gradient in gradients[1:]:
        total = total + gradient.to(reduce)
    return (total / len(gradients)).float()


def window_gradients(
    masters: nn.Module, window: list[tuple[torch.Tensor, torch.Tensor]], policy: Policy, scale: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients (fp32, times ``scale``) of one accumulation window."""
    loss, sums, own = 0.0, {}, {}
    for batch in window:
        micro_loss, found = micro_gradients(masters, batch, policy, scale / len(window))
        loss += micro_loss / len(window)
        for name in found[0]:
            ranks = [gradients[name] for gradients in found]
            if policy.whole_window:
                typed = [g.to(policy.reduce if g.ndim else g.dtype) for g in ranks]
                before = own.get(name)
                own[name] = typed if before is None else [a + b for a, b in zip(before, typed, strict=True)]
            else:
                mean = average(ranks, policy.reduce)
                sums[name] = sums[name] + mean if name in sums else mean
    return loss, sums or {name: average(ranks, policy.reduce) for name, ranks in own.items()}


def train(
    optimizer_name: str, policy: Policy, accumulation: int, scale: float = 1.0, overflow_at: int = -1
) -> Result:
    """Train as ``problem.train`` does, under the policy. The scale halves, and the step is skipped, at overflows.

    ``overflow_at``: the step at which gradients are infinite.
    """
    torch.set_num_threads(1)
    model = problem.make_model()
    optimizer = problem.make_optimizer(optimizer_name, model)
    result = Result()
    batches = problem.make_batches(STEPS * accumulation)
    for step in range(STEPS):
        window = batches[step * accumulation : (step + 1) * accumulation]
        loss, gradients = window_gradients(model, window, policy, scale)
        result.losses.append(loss)
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name] / scale
        result.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), problem.CLIP).item())
        overflow = step == overflow_at or not all(g.isfinite().all() for g in gradients.values())
        result.skipped.append(overflow)
        if overflow:
            scale /= 2
        else:
            optimizer.step()
        result.scales.append(scale)
        optimizer.zero_grad()
    result.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result
