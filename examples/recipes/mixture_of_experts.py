"""A mixture of experts, whose experts are spread over the processes.

    python examples/recipes/mixture_of_experts.py
    lockstep launch --nproc 2 examples/recipes/mixture_of_experts.py

Handwritten digits are cut into four patches, and each patch visits two of eight small networks. On two processes each
holds four of them (`parallel="ep=2"`), and patches travel to their experts and back. Choices, capacities and losses are
those of one process.

For a real model, whose feed-forward layers are a `MixtureOfExperts` (Mixtral's and others are spread by `zero=3`):
    lockstep launch --nproc 8 --mixed-precision bf16 --parallel "ep=8 activation=full" train.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from data import digit_images
from lockstep import Accelerator, PartialState
from lockstep.nn import MixtureOfExperts, load_balance_loss

WIDTH, EXPERTS = 32, 8


class Classifier(nn.Module):
    def __init__(self, capacity_factor: float) -> None:
        super().__init__()
        self.embed = nn.Linear(16, WIDTH)
        self.position = nn.Parameter(torch.zeros(4, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixtures = nn.ModuleList(
            MixtureOfExperts(WIDTH, 2 * WIDTH, EXPERTS, top_k=2, capacity_factor=capacity_factor)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, 1, 8, 8] to logits [batch, 10]."""
        patches = images.view(-1, 2, 4, 2, 4).transpose(2, 3).reshape(-1, 4, 16)
        x = self.embed(patches) + self.position
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return self.head(x.mean(1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images, over all processes")
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--balance", type=float, default=0.02, help="weight of the load-balance loss")
    args = parser.parse_args()

    processes = PartialState().num_processes
    accelerator = Accelerator(parallel=f"ep={processes}" if processes > 1 else None, split_batches=True)
    torch.manual_seed(0)
    model = Classifier(args.capacity_factor)
    mixture = model.mixtures[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loader = DataLoader(digit_images()[0], args.batch_size, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    held = sum(p.numel() for p in accelerator.unwrap_model(model).mixtures[0].experts.parameters())
    accelerator.print(
        f"{EXPERTS} experts of {held // EXPERTS} parameters, {EXPERTS // processes} on each process"
    )
    for epoch in range(1, args.epochs + 1):
        losses, loads, dropped = [], torch.zeros(EXPERTS), []
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss + args.balance * load_balance_loss(model))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean"))
            loads += mixture.load.tokens_per_expert.cpu()
            dropped.append(mixture.load.dropped_fraction)
        shares = " ".join(f"{share:5.1%}" for share in (loads / loads.sum()).tolist())
        accelerator.print(
            f"epoch {epoch}: loss {torch.stack(losses).mean():.5f}, experts of the first layer {shares}, "
            f"dropped {torch.stack(dropped).mean():.1%}"
        )


if __name__ == "__main__":
    main()
