"""Keeps an average of a sharded model's weights (EMA), saves it, and evaluates with it.

    python examples/recipes/ema.py
    lockstep launch --nproc 2 examples/recipes/ema.py
    lockstep launch --nproc 2 examples/recipes/ema.py --parallel zero=3 --out runs/ema    # again, and it goes on

The average is a second model that is prepared like the first: sharded in the same way, so that an update sends nothing;
part of each checkpoint, which any number of processes can load; and called like any model.

For a real model:
    lockstep launch --nproc 8 --mixed-precision bf16 ema.py --parallel zero=3 --decay 0.9999 --out runs/ema
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from data import digit_images
from lockstep import Accelerator, NoCheckpointError, ProjectConfiguration
from lockstep.utils import set_seed


def new_model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Sequential(*blocks), nn.Linear(64, 10)
    )


@torch.no_grad()
def update(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average <- decay * average + (1 - decay) * model; of sharded models each rank updates its shards."""
    averaged, trained = list(average.parameters()), list(model.parameters())
    get_ema_multi_avg_fn(decay)(averaged, trained, 0)
    for of_average, of_model in zip(average.buffers(), model.buffers(), strict=True):
        of_average.copy_(of_model)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images in a micro-batch, over all processes"
    )
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument(
        "--decay", type=float, default=0.95, help="how much an update keeps of the average (0.95)"
    )
    parser.add_argument("--parallel", default="zero=3", help="how both models are spread (zero=3)")
    parser.add_argument("--out", type=Path, help="save each epoch here, and go on from what is there")
    args = parser.parse_args()

    accelerator = Accelerator(
        split_batches=True,
        gradient_accumulation_steps=args.accumulation,
        parallel=args.parallel,
        project_config=ProjectConfiguration(args.out, automatic_checkpoint_naming=True, total_limit=2),
    )
    training, test = digit_images()
    set_seed(0)
    model = new_model()
    average = copy.deepcopy(model).requires_grad_(False)
    of_both = sum(parameter.nbytes for both in (model, average) for parameter in both.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, test_loader = DataLoader(training, args.batch_size, shuffle=True), DataLoader(test, 64)
    model, average, optimizer, loader, test_loader = accelerator.prepare(
        model, average, optimizer, loader, test_loader
    )
    if args.out:
        try:
            accelerator.load_state()  # both models
        except NoCheckpointError:
            accelerator.print("a new run")

    @torch.no_grad()
    def test_loss(tested: nn.Module) -> float:
        losses = [
            accelerator.gather_for_metrics(F.cross_entropy(tested(x), y, reduction="none"))
            for x, y in test_loader
        ]
        return torch.cat(losses).mean().item()

    sent_by_updates = 0.0
    while loader.epoch < args.epochs:
        for x, y in loader:
            with accelerator.accumulate(model):
                losses = F.cross_entropy(model(x), y, reduction="none")
                accelerator.backward(losses, weight=accelerator.sample_weights())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                with accelerator.communication() as counter:
                    update(average, model, args.decay)
                sent_by_updates += counter.wire_bytes()
        accelerator.print(
            f"epoch {loader.epoch}: test loss {test_loss(model):.6f}, of the averaged weights {test_loss(average):.6f}"
        )
        if args.out:
            accelerator.save_state()
    accelerator.print(
        f"each process holds {accelerator.state_bytes().weights} bytes of the two models' weights, of {of_both}; "
        f"updates of the average sent {sent_by_updates:.0f} bytes"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
