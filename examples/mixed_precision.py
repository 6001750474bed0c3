"""Mixed precision: what is computed in which type, and what fp16 does when a gradient overflows.

    python examples/mixed_precision.py --mixed-precision bf16
    lockstep launch --nproc 2 examples/mixed_precision.py --mixed-precision fp16

Parameters, gradients and outputs stay in float32; matrix products run in the lower precision. fp16 has a
narrow range, so the loss is multiplied by a scale: when gradients overflow, the step is skipped and the scale
halved.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.utils import GradScalerKwargs


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], default="bf16")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    # The usual start is 2**16. This one is far too large, to show steps being skipped.
    accelerator = Accelerator(
        split_batches=True,
        mixed_precision=args.mixed_precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**24)],
    )
    torch.manual_seed(0)
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    inside: set[str] = set()
    model[0].register_forward_hook(lambda module, inputs, output: inside.add(name(output.dtype)))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
    )

    steps = skipped = 0
    for epoch in range(args.epochs):
        total = torch.zeros((), device=accelerator.device)
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # undoes the scale first
            optimizer.step()
            steps += 1
            skipped += accelerator.optimizer_step_was_skipped
            total += loss.detach()
        mean_loss = accelerator.reduce(total / len(loader), "mean")
        accelerator.print(f"epoch {epoch + 1}: loss {mean_loss:.4f}")

    parameter = next(model.parameters())
    accelerator.print(
        f"mixed precision {accelerator.mixed_precision}: parameters {name(parameter.dtype)}, "
        f"inside the model {', '.join(sorted(inside))}, outputs {name(outputs.dtype)}, "
        f"gradients {name(parameter.grad.dtype)}\n"
        f"{steps} steps, {skipped} skipped"
    )


if __name__ == "__main__":
    main()
