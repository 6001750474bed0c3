"""Trains a ResNet with batch normalisation, or a vision transformer, on images of digits.

    lockstep launch --nproc 2 examples/recipes/image_classifier.py --model resnet --parallel "ddp sync_batchnorm"
    lockstep launch --nproc 2 examples/recipes/image_classifier.py --model vit

Batch normalisation takes mean and variance over the rows that a process has. So with "ddp" two processes, each with
half of a batch, train with other numbers than one. With "ddp sync_batchnorm" the statistics are those of the whole
batch: losses and running statistics are those of one process, for two small messages a layer. Use it when a process has
few rows, 16 or fewer, whose statistics are noisy. The vision transformer has layer normalisation, which looks at one
row only: there the word changes nothing, and is left out.

For a real model: `torchvision.models.resnet50(weights="DEFAULT")`, or
`ViTForImageClassification.from_pretrained("google/vit-base-patch16-224")`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from data import digit_images
from lockstep import Accelerator
from lockstep.utils import set_seed


class Block(nn.Module):
    """Two convolutions beside a shortcut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """[rows, 1, 8, 8] to logits [rows, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class VisionTransformer(nn.Module):
    """The model of `transformers`, with logits as its output."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        self.model = ViTForImageClassification(
            ViTConfig(
                image_size=8, patch_size=2, num_channels=1, hidden_size=48, intermediate_size=96, num_labels=10,
                num_hidden_layers=2, num_attention_heads=4,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.05)


MODELS = {"resnet": (resnet, sgd, "ddp sync_batchnorm"), "vit": (VisionTransformer, adamw, "ddp")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="resnet")
    parser.add_argument("--parallel", help='how it is spread: "ddp", "ddp sync_batchnorm", "zero=3", ...')
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all processes")
    args = parser.parse_args()
    make_model, make_optimizer, parallel = MODELS[args.model]

    accelerator = Accelerator(parallel=args.parallel or parallel, split_batches=True)
    set_seed(0)
    training, test = digit_images()
    # Without drop_last the last batch would be filled up with rows that count in the statistics, too.
    train = DataLoader(training, args.batch_size, shuffle=True, drop_last=True)
    validation = DataLoader(test, args.batch_size)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))
    model, optimizer, scheduler, train, validation = accelerator.prepare(
        model, optimizer, scheduler, train, validation
    )

    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
        train_loss = accelerator.reduce(total / len(train), "mean")

        model.eval()
        results = []
        for images, labels in validation:
            with torch.no_grad():
                logits = model(images)
            losses = F.cross_entropy(logits, labels, reduction="none")
            results.append(
                accelerator.gather_for_metrics(torch.stack([losses, logits.argmax(1) == labels], dim=1))
            )
        loss, accuracy = torch.cat(results).double().mean(0).tolist()
        accelerator.print(
            f"epoch {epoch + 1}: train loss {train_loss:.6f}, test loss {loss:.6f}, accuracy {accuracy:.4f} "
            f"on {len(torch.cat(results))} images"
        )


if __name__ == "__main__":
    main()
