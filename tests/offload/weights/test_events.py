"""When a model's groups are used."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def test_activation_checkpointing_computes_a_forward_within_backward() -> None:
    model = Blocks(blocks=2)
    log, _ = listened(model)
    hidden = model.embedding(WORDS)
    for block in model.blocks:
        hidden = checkpoint(block, hidden, use_reentrant=False)
    log.taken()
    hidden.sum().backward()
    again = log.taken()
    assert again.index("backward blocks.1") < again.index("begin blocks.1") < again.index("backward blocks.0")
    assert again.index("begin blocks.0") < again.index("backward embedding")


def test_a_forward_that_fails_ends_too() -> None:
    model = Blocks(blocks=2)
    log, _ = listened(model)
    model.blocks[1][1].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(RuntimeError):
        model(WORDS)
    assert log.taken() == [*FORWARD[:5], "end blocks.1"]


def test_hooks_go_when_they_are_removed_and_never_into_a_copy() -> None:
    model = Blocks(blocks=2)
    log = Log()
    hooks = listen(model, find_weight_groups(model, model.named_blocks()), [log])
    model.hooks = hooks
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(WORDS), model(WORDS))
        assert log.taken() == FORWARD
        other.hooks.remove()
        model(WORDS).sum().backward()
        assert log.taken() == FORWARD + BACKWARD
    hooks.remove()
    model(WORDS).sum().backward()
    assert log.taken() == []


def test_a_compiled_model_tells_the_same() -> None:
    model = Blocks(blocks=2)
    log, _ = listened(model)
    expected = model(WORDS)
    log.taken()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        out = compiled(WORDS)
        assert log.taken() == FORWARD
        torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert log.taken() == BACKWARD
