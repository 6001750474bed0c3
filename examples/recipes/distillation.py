"""Trains a small student on what a large, frozen teacher says. Each has a strategy of its own.

    python examples/recipes/distillation.py
    lockstep launch --nproc 2 examples/recipes/distillation.py
    lockstep launch --nproc 2 examples/recipes/distillation.py --teacher-precision bf16 --student zero=2

An `Accelerator` says how models are spread, so two of them give two strategies. The teacher's weights are sharded over
the ranks and gathered block by block; the student is replicated. The last batch of an epoch is smaller than the
others. Its samples weigh the same, because `backward` gets the weight of each row.

For a real model:
    lockstep launch --nproc 8 distillation.py --teacher zero=3 --teacher-precision bf16 --student zero=2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from data import digit_images
from lockstep import Accelerator, NoCheckpointError, ProjectConfiguration
from lockstep.utils import set_seed

TEMPERATURE, OF_TEACHER = 2.0, 0.9
"""How soft the targets are; the share of the loss that is the teacher's."""


def new_classifier(width: int, blocks: int) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Sequential(*layers), nn.Linear(width, 10)
    )


def trained_teacher(images: Tensor, labels: Tensor) -> nn.Module:
    """The stand-in for a download: every process trains the same one."""
    torch.manual_seed(1)
    teacher = new_classifier(width=128, blocks=2)
    optimizer = torch.optim.Adam(teacher.parameters(), 2e-3)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(teacher(images), labels).backward()
        optimizer.step()
    return teacher.requires_grad_(False).eval()


def distillation_losses(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Of logits [rows, classes] the loss of each row (Hinton et al., 2015)."""
    soft = [F.log_softmax(logits / TEMPERATURE, dim=-1) for logits in (student, teacher)]
    divergence = F.kl_div(*soft, reduction="none", log_target=True).sum(-1) * TEMPERATURE**2
    return OF_TEACHER * divergence + (1 - OF_TEACHER) * F.cross_entropy(student, labels, reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images, over all processes")
    parser.add_argument("--teacher", default="zero=3", help="how the teacher is spread (zero=3)")
    parser.add_argument("--teacher-precision", default="no", help="no, bf16 or fp16 (no)")
    parser.add_argument("--student", default="ddp", help="how the student is spread (ddp)")
    parser.add_argument("--out", type=Path, help="save each epoch here, and go on from what is there")
    args = parser.parse_args()

    of_teacher = Accelerator(parallel=args.teacher, mixed_precision=args.teacher_precision)
    project = ProjectConfiguration(args.out, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(parallel=args.student, split_batches=True, project_config=project)

    training, test = digit_images()
    teacher = trained_teacher(*training.tensors)
    of_whole_teacher = sum(parameter.nbytes for parameter in teacher.parameters())
    teacher = of_teacher.prepare(teacher)
    set_seed(0)
    student = new_classifier(width=24, blocks=1)
    optimizer = torch.optim.AdamW(student.parameters(), 4e-3)
    loader, test_loader = DataLoader(training, args.batch_size, shuffle=True), DataLoader(test, 64)
    student, optimizer, loader, test_loader = accelerator.prepare(student, optimizer, loader, test_loader)

    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        right = [accelerator.gather_for_metrics(model(x).argmax(-1) == y) for x, y in test_loader]
        return torch.cat(right).float().mean().item()

    if args.out:
        try:
            accelerator.load_state()
        except NoCheckpointError:
            accelerator.print("a new run")
    while loader.epoch < args.epochs:
        losses = []
        for x, y in loader:
            with torch.no_grad():
                targets = teacher(x)
            row_losses = distillation_losses(student(x), targets, y)
            accelerator.backward(row_losses, weight=accelerator.sample_weights())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(row_losses.detach()))
        accelerator.print(
            f"epoch {loader.epoch}: loss {torch.cat(losses).mean():.5f} on {len(torch.cat(losses))} images, "
            f"the student is right on {accuracy(student):.4%}"
        )
        if args.out:
            accelerator.save_state()
    accelerator.print(
        f"the teacher is right on {accuracy(teacher):.4%}; each process holds {of_teacher.state_bytes().weights} bytes "
        f"of it, of {of_whole_teacher}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
