"""When a model's groups are used."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.offload.weights import WeightGroup, find_weight_groups, listen
from tests.offload.models import Blocks

FORWARD = [
    f"{edge} {name}" for name in ("embedding", "blocks.0", "blocks.1", "head") for edge in ("begin", "end")
]
BACKWARD = [f"backward {name}" for name in ("head", "blocks.1", "blocks.0", "embedding")]


class Log:
    def __init__(self) -> None:
        self.events: list[str] = []

    def forward_begins(self, group: WeightGroup) -> None:
        self.events.append(f"begin {group.name}")

    def forward_ended(self, group: WeightGroup) -> None:
        self.events.append(f"end {group.name}")

    def backward_begins(self, group: WeightGroup) -> None:
        self.events.append(f"backward {group.name}")

    def taken(self) -> list[str]:
        events, self.events = self.events, []
        return events


def listened(model: Blocks) -> tuple[Log, Log]:
    logs = Log(), Log()
    listen(model, find_weight_groups(model, model.named_blocks()), logs)
    return logs


WORDS = torch.arange(5)


def test_groups_begin_and_end_in_forward_and_begin_once_in_each_backward() -> None:
    model = Blocks(blocks=2)
    log, other = listened(model)
    loss = model(WORDS).sum()
    assert log.taken() == FORWARD
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert log.taken() == BACKWARD
    with torch.no_grad():
        model(WORDS)
    assert log.taken() == FORWARD
    assert other.taken() == FORWARD + 2 * BACKWARD + FORWARD


def test_outputs_of_any_structure_tell_of_their_backward() -> None:
    class Head(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return {"first": y, "rest": [(y * 2, None)]}

    log, model = Log(), nn.Sequential(nn.Linear(3, 3), Head(3, 3))
    listen(model, find_weight_groups(model, {}), [log])
    out = model(torch.ones(2, 3))
    log.taken()
    out["rest"][0][0].sum().backward(retain_graph=True)
    assert log.taken() == ["backward 1", "backward 0"]
    (out["rest"][0][0].sum() + out["first"].sum()).backward()
    assert log.taken() == ["backward 1", "backward 0"]
