"""Loss scaling: gradients that are too small for 16 bits are multiplied up before backward, and down after it.

    python examples/from_scratch/loss_scaling.py

In float16 everything below 6e-8 is zero, and everything above 65504 is infinite. Gradients are often near the first.
A factor on the loss is a factor on all gradients. It grows until something overflows; then it is halved, and that
step is skipped, by all processes.

Paper: Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from gradient_checkpointing import kept_bytes
from ring_all_reduce import all_reduce
from world import ROWS, Check, batch, count, mean_loss, run, same, sgd, share, small_model, wire

TINY = 1e-6
"""A factor in the loss, so that its gradients are too small for float16."""


class LossScale:
    """The factor on the loss. It follows what float16 can bear."""

    def __init__(self, start: float = 2.0**40, grow_every: int = 4) -> None:
        self.value, self.grow_every = start, grow_every
        self.good_steps = 0
        # The factor of each step so far, and whether the step was skipped.
        self.steps: list[tuple[float, bool]] = []

    def update(self, overflow: bool) -> None:
        self.steps.append((self.value, overflow))
        if overflow:
            self.value /= 2
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.grow_every:
            self.value *= 2
            self.good_steps = 0


def half_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Layers compute in float16, the loss in float32.

    Weights and their gradients are float32.
    """
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = model(inputs)
    return TINY * nn.functional.mse_loss(outputs.float(), targets)


def flat_gradient(model: nn.Module) -> Tensor:
    return parameters_to_vector(parameter.grad for parameter in model.parameters())


def train(steps: int) -> tuple[list[Tensor], LossScale]:
    """The trained parameters and the loss scale, the same on every process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, scale = small_model(), LossScale()
    optimizer = sgd(model.parameters(), lr=0.1 / TINY)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = (share(tensor, rank, size) for tensor in batch(step))
        # Divided by N here, not after the sum: then a row has the gradient that it has
        # in one process.
        (half_loss(model, inputs, targets) / size * scale.value).backward()

        gradient = all_reduce(flat_gradient(model))
        # If one process had an infinity, the sum has it on all of them. So all skip the
        # step, or none.
        overflow = not gradient.isfinite().all()
        if not overflow:
            pieces = (gradient / scale.value).split([parameter.numel() for parameter in model.parameters()])
            for parameter, piece in zip(model.parameters(), pieces, strict=True):
                parameter.grad = piece.view_as(parameter)
            optimizer.step()
        scale.update(overflow)
    return [parameter.detach() for parameter in model.parameters()], scale


def train_alone(steps: int) -> tuple[list[Tensor], float, int]:
    """The same in one process with torch's own scaler: parameters, the last scale, and how often it was halved.

    It computes the processes' shares one after the other: float16 may overflow in a sum over more rows.
    """
    size, model, ours = dist.get_world_size(), small_model(), LossScale()
    optimizer = sgd(model.parameters(), lr=0.1 / TINY)
    scaler = torch.amp.GradScaler("cpu", init_scale=ours.value, growth_interval=ours.grow_every)
    skipped = 0
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            inputs, targets = (share(tensor, rank, size) for tensor in batch(step))
            scaler.scale(half_loss(model, inputs, targets) / size).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    return [parameter.detach() for parameter in model.parameters()], scaler.get_scale(), skipped


def lost_without(scale: float) -> float:
    """The error of the gradient in float16, relative to its size, if the loss is multiplied by ``scale``."""
    model = small_model()
    (TINY * mean_loss(model, *batch(0))).backward()
    exact = flat_gradient(model).clone()
    model.zero_grad()
    (half_loss(model, *batch(0)) * scale).backward()
    return ((flat_gradient(model) / scale - exact).norm() / exact.norm()).item()


def demo(steps: int = 40) -> list[Check]:
    with wire() as sent:
        trained, scale = train(steps)
    expected, expected_scale, skipped = train_alone(steps)
    size = dist.get_world_size()
    model_bytes = 4 * sum(parameter.numel() for parameter in trained)
    without, scaled = lost_without(1.0), lost_without(scale.value / 4)
    shown = "below 1%" if scaled < 0.01 else f"{scaled:.0%}"
    with kept_bytes(model := small_model()) as kept:
        half_loss(model, *batch(0))
    # What goes into each layer, and copies of all weights but the first: the inputs need
    # no gradient.
    in_half = ROWS * (8 + 16 + 16) + 16 * 16 + 16 * 4
    return [
        Check("error of the gradient, not scaled", f"{without:.0%}", "above 50%", without > 0.5),
        Check("error of the gradient, scaled", shown, "below 1%", scaled < 0.01),
        same("parameters, beside torch's scaler, one process", trained, expected, within=1e-5),
        count("log2 of the scale at the end", round(math.log2(scale.value)), math.log2(expected_scale)),
        count("steps skipped", sum(skipped for _, skipped in scale.steps), skipped),
        # The loss keeps 4 outputs and 4 targets a row in float32.
        count("bytes kept for backward, layers in 16 bits", sum(kept.values()), 2 * in_half + 4 * ROWS * 8),
        count(
            "bytes sent in a step: 2 (N - 1) / N", sent.bytes // steps, 2 * (size - 1) / size * model_bytes
        ),
    ]


if __name__ == "__main__":
    run(demo, processes=2)
