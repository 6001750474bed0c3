"""The groups in which weights move."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.offload.weights import WeightGroup, enclosing_groups, find_weight_groups
from tests.offload.models import Blocks


def names(groups: list[WeightGroup]) -> list[str]:
    return [group.name for group in groups]


def test_every_parameter_and_buffer_is_in_exactly_one_group() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.list = nn.ParameterList([torch.ones(2), torch.ones(2)])
            self.norms = nn.ModuleDict({"a": nn.BatchNorm1d(4), "b": nn.Sequential(nn.Linear(4, 4))})
            self.attention = nn.MultiheadAttention(4, 2)
            self.encoder = nn.TransformerEncoderLayer(4, 2)
            self.recurrent = nn.LSTM(4, 4)
            self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    model = Odd()
    groups = find_weight_groups(model, {})
    tensors = [tensor for group in groups for tensor in group.tensors.values()]
    everything = [*model.parameters(), *model.buffers()]
    assert sorted(map(id, tensors)) == sorted(map(id, everything))
    found = {full: tensor for group in groups for full, tensor in group.tensors.items()}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {full: id(tensor) for full, tensor in found.items()} == {full: id(t) for full, t in state.items()}
    # Lists are never called, so theirs belong to the model; attention and the encoder layer use inner weights.
    assert names(groups)[:3] == ["", "norms.a", "norms.b.0"]
    assert {"scale", "list.0", "list.1"} == set(groups[0].tensors)
    assert "attention" in names(groups) and "attention.out_proj" not in names(groups)
    assert "encoder" in names(groups) and "encoder.linear1" not in names(groups)


def test_groups_that_share_a_tensor_become_one() -> None:
    model = Blocks(blocks=2)
    model.head.weight = model.embedding.weight
    groups = find_weight_groups(model, model.named_blocks())
    assert names(groups) == ["embedding", "blocks.0", "blocks.1"]
    assert groups[0].modules == [model.embedding, model.head]
    assert list(groups[0].tensors) == ["embedding.weight", "head.bias"]
    assert groups[0].nbytes == model.embedding.weight.nbytes + model.head.bias.nbytes
    model.blocks[1][1].weight = model.blocks[0][1].weight
    groups = find_weight_groups(model, model.named_blocks())
    assert names(groups) == ["embedding", "blocks.0"]
    assert groups[1].modules == list(model.blocks) and len(groups[1].tensors) == 7


def test_groups_around_others_are_those_whose_modules_hold_theirs() -> None:
    model = Blocks(blocks=1)
    model.token = nn.Parameter(torch.zeros(3))
    root, embedding, block, head = groups = find_weight_groups(model, model.named_blocks())
    assert enclosing_groups(groups) == {root: [], embedding: [root], block: [root], head: [root]}
