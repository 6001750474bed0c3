"""Trains the GPT with the optimizer's state, or everything, on disk: its losses are those of training in memory.

    python examples/gpt/offload.py
    python examples/gpt/offload.py --parallel "offload=all offload_to=runs/offload"
    lockstep launch --nproc 2 examples/gpt/offload.py --parallel "zero=3 offload=all offload_to=runs/offload"

Adam keeps two numbers for each weight: twice the size of the model. With `offload=optimizer` and a folder they lie in
a file, which is gone when the process is; a step reads, computes and writes block after block while the next forward
runs.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import chain, islice, repeat

import corpus
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Accelerator
from lockstep.utils import set_seed
from model import GPT, GPTConfig

CONFIG = GPTConfig(width=192, layers=6)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parallel", help="how to train (default: the optimizer in a temporary folder)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    chosen = parser.parse_args()
    parallel = chosen.parallel or f"offload=optimizer offload_to={tempfile.gettempdir()}"

    accelerator = Accelerator(parallel=parallel)
    set_seed(0)
    text, _ = corpus.load()
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(corpus.Windows(text, CONFIG.context), batch_size=chosen.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    batches = chain.from_iterable(repeat(loader))
    for step, windows in enumerate(islice(batches, chosen.steps), start=1):
        optimizer.zero_grad()
        loss = loss_of(model, windows)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0 or step == chosen.steps:
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"step {step:3d}: loss {mean:.6f}")
    held = accelerator.state_bytes()
    accelerator.print(
        f"{parallel}: weights {held.weights / 1e6:.1f} MB, gradients {held.gradients / 1e6:.1f} MB, optimizer "
        f"{held.optimizer / 1e6:.1f} MB, of them in files {held.on_disk / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
