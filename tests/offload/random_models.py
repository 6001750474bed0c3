"""Random trees of modules whose tensors have no values."""

from __future__ import annotations

import random

import torch
from torch import nn


class Leaf(nn.Module):
    """A module without children: up to two parameters, perhaps a buffer."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        dtype = rng.choice([torch.float32, torch.float16])
        for index in range(rng.randint(0, 2)):
            value = torch.empty(rng.randint(0, 9), dtype=dtype, device="meta")
            self.register_parameter(f"p{index}", nn.Parameter(value))
        if rng.random() < 0.3:
            value = torch.empty(
                rng.randint(1, 5), dtype=rng.choice([torch.float32, torch.int64]), device="meta"
            )
            self.register_buffer("b", value, persistent=rng.random() < 0.7)


class Block(nn.Module):
    pass


class Node(nn.Module):
    pass


def random_model(rng: random.Random) -> nn.Module:
    model = Node()
    for index in range(rng.randint(1, 5)):
        model.add_module(f"m{index}", _tree(rng, 3))
    if rng.random() < 0.3:
        model.register_buffer("rb", torch.empty(rng.randint(1, 9), device="meta"))
    if rng.random() < 0.3:
        model.register_parameter("rp", nn.Parameter(torch.empty(rng.randint(1, 9), device="meta")))
    slots = [(module, key) for module in model.modules() for key in module._parameters]
    for _ in range(rng.choice([0, 0, 1, 2]) if len(slots) > 1 else 0):
        (one, key), (other, other_key) = rng.sample(slots, 2)
        other._parameters[other_key] = one._parameters[key]
    return model


def _tree(rng: random.Random, depth: int) -> nn.Module:
    if depth == 0 or rng.random() < 0.3:
        return Leaf(rng)
    node = rng.choice([Block, Node])()
    for index in range(rng.randint(1, 4)):
        # "a1" is the beginning of "a10", which no rule about names may confuse
        node.add_module(rng.choice(["a", "b", "a1"]) + str(index), _tree(rng, depth - 1))
    if rng.random() < 0.3:
        node.register_parameter("w", nn.Parameter(torch.empty(rng.randint(1, 9), device="meta")))
    return node
