"""Trains two towers as CLIP does: which upper half of a digit belongs to which lower half?

    lockstep launch --nproc 2 examples/recipes/contrastive.py

The loss compares every row with all rows of the global batch. So the embeddings of all processes are gathered, and
gradients flow back through `gather_for_loss`. With `--local` each process compares its own rows only. That is an easier
task, and another one for each number of processes.

For a real model: `CLIPModel.from_pretrained("openai/clip-vit-base-patch32")`, whose output has `image_embeds` and
`text_embeds`.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from data import digit_images
from lockstep import Accelerator
from lockstep.utils import set_seed


class Towers(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(nn.Flatten(), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, width))
            for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(2.3))  # log(10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, 1, 8, 8] to an embedding of each upper half, and of each lower half, [rows, width]; and the scale."""
        upper, lower = self.upper(images[:, :, :4]), self.lower(images[:, :, 4:])
        return F.normalize(upper, dim=1), F.normalize(lower, dim=1), self.log_scale.exp()


def contrastive_loss(upper: Tensor, lower: Tensor, scale: Tensor) -> Tensor:
    """Mean loss of finding the partner of each row of [rows, width] among all rows, in both directions."""
    products = scale * upper @ lower.T
    partners = torch.arange(len(products), device=products.device)
    return (F.cross_entropy(products, partners) + F.cross_entropy(products.T, partners)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="images per step, over all processes")
    parser.add_argument(
        "--local", action="store_true", help="contrast rows of one process only, to see what it costs"
    )
    args = parser.parse_args()

    accelerator = Accelerator(split_batches=True)
    set_seed(0)
    training, test = digit_images()
    train = DataLoader(training, args.batch_size, shuffle=True)
    validation = DataLoader(test, args.batch_size)
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train, validation = accelerator.prepare(model, optimizer, train, validation)

    for epoch in range(args.epochs):
        model.train()
        for images, _ in train:
            upper, lower, scale = model(images)
            if not args.local:
                upper, lower = accelerator.gather_for_loss((upper, lower))  # [rows of all processes, width]
            accelerator.backward(contrastive_loss(upper, lower, scale))
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        embeddings = []
        for images, _ in validation:
            with torch.no_grad():
                upper, lower, scale = model(images)
            embeddings.append(accelerator.gather_for_metrics(torch.stack([upper, lower], dim=1)))
        upper, lower = torch.cat(embeddings).unbind(1)
        loss = contrastive_loss(upper, lower, scale)
        found = (upper @ lower.T).argmax(1) == torch.arange(len(upper), device=upper.device)
        if epoch % 5 == 4 or epoch + 1 == args.epochs:
            accelerator.print(
                f"epoch {epoch + 1}: loss {loss:.6f}, accuracy {found.float().mean():.4f} among {len(upper)} halves"
            )


if __name__ == "__main__":
    main()
