"""Scripts that change a setting of a pipeline's model between steps; run on each rank."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import LockstepError
from tests.verify.cells import Messages

WIDTH, ROWS, STEPS = 8, 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.centres = False

    def forward(self, x: Tensor) -> Tensor:
        if self.centres:
            x = x - x.mean(0, keepdim=True)  # mixes the rows of the batch
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.reduction = "mean"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x)[:, 0], y, reduction=self.reduction)


def changed(
    name: str, attribute: str, values: list[Any], parallel: str = "pp=2"
) -> tuple[list[str], str, int]:
    """With an attribute of a module set before each step: what is said of proofs, the refusal, and steps made."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    messages = Messages()
    logger = logging.getLogger("lockstep")
    before = logger.level
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    accelerator = Accelerator(cpu=True, parallel=parallel)
    user = Model()
    setting = user.get_submodule(name)
    model, optimizer = accelerator.prepare(user, torch.optim.SGD(user.parameters(), 1e-3))
    steps, text = 0, ""
    try:
        for value in values:
            setattr(setting, attribute, value)
            x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS)
            accelerator.backward(model(x, y))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    except LockstepError as error:
        text = str(error)
    finally:
        logger.removeHandler(messages)
        logger.setLevel(before)
        accelerator.free_memory()
    return [line for line in messages.texts if "verified" in line], text, steps
