"""A training whose step 13 goes wrong: ``training.py WHAT RUN_DIR DUMPS``, with what goes wrong in words."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lockstep import Accelerator, SpikePolicy, set_seed
from tests.replay.planted import ALL, BACKWARD, BLOCKS, FINITE, FORWARD, Planted

ROWS, WIDTH, STEPS, BAD = 6, 8, 14, 12
NAN_TOKEN = 9


class Fault(nn.Module):
    def __init__(self, planted: Planted) -> None:
        super().__init__()
        self.does = {**FORWARD, **BACKWARD, **FINITE}.get(planted.kind, lambda x: x)

    def forward(self, x: Tensor, is_bad: bool) -> Tensor:
        return self.does(x) if is_bad else x


class Block(nn.Module):
    def __init__(self, planted: Planted | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        is_own = planted is not None and planted.own_code
        self.own = Fault(planted).does if is_own else None
        self.fault = Fault(planted) if planted is not None and not is_own else None
        self.grows = planted is not None and planted.kind == "half"

    def forward(self, x: Tensor, is_bad: bool) -> Tensor:
        hidden = self.norm(x)
        if is_bad and self.own is not None:
            hidden = self.own(hidden)
        if self.fault is not None:
            hidden = self.fault(hidden, is_bad)
        if is_bad and self.grows:
            hidden = hidden * 60000.0
        return x + self.drop(self.linear(hidden))


class Net(nn.Module):
    def __init__(self, planted: Planted) -> None:
        super().__init__()
        self.enter = nn.Embedding(NAN_TOKEN + 1, WIDTH)
        self.blocks = nn.ModuleList(
            Block(planted if number == planted.block else None) for number in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 1)
        if planted.kind == "half":
            with torch.no_grad():
                self.blocks[planted.block].linear.weight.fill_(1.0)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, x: Tensor, is_bad: bool) -> Tensor:
        self.calls += 1
        hidden = self.enter(tokens) + x + 0.01 * torch.tanh(self.calls)
        for block in self.blocks:
            hidden = block(hidden, is_bad)
        return self.head(hidden)


def batches(planted: Planted, ranks: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for step in range(STEPS):
        for place in range(planted.accumulation * ranks):
            is_bad = step == BAD and place == planted.accumulation * ranks - 1
            tokens = torch.randint(NAN_TOKEN, (ROWS,), generator=generator)
            x = torch.randn(ROWS, WIDTH, generator=generator)
            if is_bad and planted.kind == "embedding":
                tokens[2] = NAN_TOKEN
            if is_bad and planted.where == "batch":
                x[4, 1] = float(planted.kind.split()[1])
            y = torch.randn(ROWS, 1, generator=generator)
            found.append(
                {"tokens": tokens, "x": x, "y": y, "bad": torch.full((ROWS,), is_bad + 2 * (step == BAD))}
            )
    return found


def loss_of(planted: Planted, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    is_bad = int(batch.pop("bad")[0]) == 3
    noise = 1 + 0.01 * random.random() + 0.01 * float(np.random.rand())
    x = batch["x"] * noise
    if is_bad and planted.kind == "script root":
        x = (-x.abs() - 1).sqrt()
    output = model(batch["tokens"], x, is_bad).float()
    loss = (output - batch["y"]).square()
    if is_bad and planted.kind == "loss log":
        return (loss * 0).log().mean()
    if is_bad and planted.kind == "loss mean":
        return loss[loss < 0].mean()
    return loss.mean()


def main(what: str, run_dir: str, dumps: str) -> None:
    planted = ALL[what]
    set_seed(0)
    is_saved = what.endswith("saved")
    policy = SpikePolicy(
        window=10,
        warmup=10,
        loss_threshold=50.0,
        gradient_norm_threshold=50.0,
        capsule_weights=not is_saved,
    )
    accelerator = Accelerator(
        cpu=True,
        run_dir=run_dir,
        mixed_precision="fp16" if planted.kind == "half" else "no",
        gradient_accumulation_steps=planted.accumulation,
        kwargs_handlers=[policy],
    )
    model = Net(planted)
    if planted.kind == "embedding":
        with torch.no_grad():
            model.enter.weight[NAN_TOKEN] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = batches(planted, accelerator.num_processes)
    rows = [{name: tensor[i] for name, tensor in batch.items()} for batch in data for i in range(ROWS)]
    loader = torch.utils.data.DataLoader(rows, batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        if is_saved and number == BAD - 2:
            accelerator.save_state(Path(dumps) / "checkpoint")
        with accelerator.accumulate(model):
            is_kept = bool(batch["bad"][0])
            loss = loss_of(planted, model, batch)
            accelerator.backward(loss)
            if what.startswith("own steps") and number % 2 == 0:
                continue
            if accelerator.sync_gradients and is_kept:
                dump(Path(dumps), accelerator, model, loss)
            if planted.clips:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


def dump(folder: Path, accelerator: Accelerator, model: nn.Module, loss: Tensor) -> None:
    """The loss and gradients of the bad step: of the run, then of its replay, of each rank in turn."""
    number = sum(1 for _ in folder.glob(f"rank-{accelerator.process_index}-*"))
    plain = accelerator.unwrap_model(model)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in plain.named_parameters()}
    torch.save({"loss": loss.detach(), **gradients}, folder / f"rank-{accelerator.process_index}-{number}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
