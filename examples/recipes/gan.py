"""Trains a GAN: two models, two optimizers, one loop. Its losses are the same on any number of processes.

    python examples/recipes/gan.py
    lockstep launch --nproc 2 examples/recipes/gan.py --accumulation 4 --parallel zero=2

The generator makes handwritten digits of noise, and the discriminator tells them from real ones. Three things keep the
numbers those of one process. Noise belongs to its image, so that every rank draws what one process would draw. Both
losses are taken before either model steps, so that accumulated micro-batches equal one large batch. And the
discriminator takes no gradient from the generator's loss.

For a real model:
    lockstep launch --nproc 8 --mixed-precision bf16 --parallel zero=2 gan.py --epochs 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from data import digit_images
from lockstep import Accelerator, NoCheckpointError, ProjectConfiguration
from lockstep.utils import set_seed

NOISE = 16  # numbers of which an image is made


class DigitsWithNoise(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of an image [64] in -1..1 and noise [16], which is another one in each epoch."""

    def __init__(self) -> None:
        self.images = 2 * digit_images()[0].tensors[0].flatten(1) - 1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:  # a prepared loader calls it
        self.noise = torch.randn(len(self), NOISE, generator=torch.Generator().manual_seed(epoch))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.noise[index]


def new_generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 96), nn.LeakyReLU(0.2), nn.Linear(96, 64), nn.Tanh())


def new_discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.LeakyReLU(0.2), nn.Linear(96, 1))


def discriminator_loss(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Real images are to get 1, generated ones 0. One call of the model sees both."""
    logits = discriminator(torch.cat([real, fake.detach()])).flatten()
    answers = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))]).to(logits)
    return F.binary_cross_entropy_with_logits(logits, answers)


def generator_loss(discriminator: nn.Module, fake: Tensor) -> Tensor:
    """Generated images are to be taken for real ones."""
    logits = discriminator(fake).flatten()
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images in a micro-batch, over all processes"
    )
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--parallel", help="how both models are spread (default: ddp)")
    parser.add_argument("--out", type=Path, help="save each epoch here, and go on from what is there")
    args = parser.parse_args()

    accelerator = Accelerator(
        split_batches=True,
        gradient_accumulation_steps=args.accumulation,
        parallel=args.parallel,
        project_config=ProjectConfiguration(args.out, automatic_checkpoint_naming=True, total_limit=2),
    )
    set_seed(0)
    generator, discriminator = new_generator(), new_discriminator()
    parameters = sum(p.numel() for model in (generator, discriminator) for p in model.parameters())
    of_generator = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.999))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), 1e-3, betas=(0.5, 0.999))
    loader = DataLoader(DigitsWithNoise(), args.batch_size, shuffle=True, drop_last=True)
    generator, discriminator, of_generator, of_discriminator, loader = accelerator.prepare(
        generator, discriminator, of_generator, of_discriminator, loader
    )
    if args.out:
        try:
            accelerator.load_state()
        except NoCheckpointError:
            accelerator.print("a new run")

    while loader.epoch < args.epochs:
        steps, losses = 0, []
        with accelerator.communication() as counter:
            for real, noise in loader:
                with accelerator.accumulate(generator, discriminator):
                    fake = generator(noise)
                    loss_of_discriminator = discriminator_loss(discriminator, real, fake)
                    accelerator.backward(loss_of_discriminator)
                    discriminator.requires_grad_(False)  # the gradient passes through it to the generator
                    loss_of_generator = generator_loss(discriminator, fake)
                    accelerator.backward(loss_of_generator)
                    discriminator.requires_grad_(True)
                    for optimizer in (of_discriminator, of_generator):
                        optimizer.step()
                        optimizer.zero_grad()
                steps += accelerator.sync_gradients
                losses.append(torch.stack([loss_of_discriminator.detach(), loss_of_generator.detach()]))
        means = accelerator.reduce(torch.stack(losses).mean(0), "mean").tolist()
        accelerator.print(
            f"epoch {loader.epoch}: discriminator's loss {means[0]:.5f}, generator's loss {means[1]:.5f}, "
            f"{counter.wire_bytes() / steps:.0f} bytes sent in a step"
        )
        if args.out:
            accelerator.save_state()
    accelerator.print(f"both models: {parameters} parameters")
    accelerator.end_training()


if __name__ == "__main__":
    main()
