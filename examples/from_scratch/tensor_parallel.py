"""Tensor parallel layers: each process has a part of a matrix, and all compute on the same inputs.

    python examples/from_scratch/tensor_parallel.py

A matrix is split by its outputs (columns) or by its inputs (rows). One after the other, these need one sum over the
processes. An embedding and the loss are split along the vocabulary.

Paper: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism, 2019.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ring_all_reduce import all_gather, all_reduce
from world import Check, count, run, same, share, wire

VOCABULARY, WIDTH, HIDDEN = 32, 8, 32


def mine(tensor: Tensor, dim: int = 0) -> Tensor:
    """This process's part of a tensor, along one of its dimensions."""
    return share(tensor.detach().transpose(0, dim), dist.get_rank(), dist.get_world_size()).transpose(0, dim)


class CopyToAll(torch.autograd.Function):
    """Nothing in forward. Backward sums the gradients that came through the parts."""

    @staticmethod
    def forward(ctx, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return all_reduce(gradient)


class SumOverAll(torch.autograd.Function):
    """Forward sums. Nothing in backward: each part enters the sum with a factor of one."""

    @staticmethod
    def forward(ctx, partial: Tensor) -> Tensor:
        return all_reduce(partial)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class ColumnParallelLinear(nn.Module):
    """Whole inputs [..., in] to this process's part of the outputs [..., out / N]."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(mine(layer.weight))
        self.bias = nn.Parameter(mine(layer.bias))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(CopyToAll.apply(inputs), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This process's part of the inputs [..., in / N] to whole outputs [..., out]."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(mine(layer.weight, dim=1))
        self.bias = nn.Parameter(layer.bias.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        # The bias comes after the sum, or it would be added N times.
        return SumOverAll.apply(F.linear(inputs, self.weight)) + self.bias


class ParallelMLP(nn.Module):
    """Columns, gelu, rows. In between nobody needs what the others have."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(up), RowParallelLinear(down)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(inputs)))


def held_here(tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Which tokens lie in this process's rows of the vocabulary, and in which row; 0 for the others."""
    places = tokens - dist.get_rank() * rows
    inside = (places >= 0) & (places < rows)
    return inside, places.where(inside, 0)


class VocabParallelEmbedding(nn.Module):
    """Tokens [...] to vectors [..., width]: zeros for tokens that another process has."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(mine(embedding.weight))

    def forward(self, tokens: Tensor) -> Tensor:
        inside, rows = held_here(tokens, len(self.weight))
        return SumOverAll.apply(F.embedding(rows, self.weight) * inside.unsqueeze(-1))


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss from this process's part of the logits, [tokens, vocabulary / N]."""
    # Largest logits first: exp of what is at most zero cannot overflow.
    highest = all_gather(logits.detach().amax(-1)).view(dist.get_world_size(), -1).amax(0)
    total = SumOverAll.apply((logits - highest.unsqueeze(-1)).exp().sum(-1))
    inside, places = held_here(targets, logits.shape[-1])
    right = SumOverAll.apply(logits.gather(-1, places.unsqueeze(-1)).squeeze(-1) * inside)
    return (total.log() + highest - right).mean()


def demo() -> list[Check]:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    tokens, targets = torch.randint(VOCABULARY, (2, 48))
    plain = F.cross_entropy(head(down(F.gelu(up(embedding(tokens))))), targets)
    plain.backward()

    parts = VocabParallelEmbedding(embedding), ParallelMLP(up, down), ColumnParallelLinear(head)
    split_embedding, mlp, split_head = parts
    loss = vocab_parallel_cross_entropy(split_head(mlp(split_embedding(tokens))), targets)
    loss.backward()
    split = [split_embedding.weight, mlp.up.weight, mlp.down.weight, split_head.bias]
    ours = [part.grad.clone() for part in split]
    whole = [(embedding.weight, 0), (up.weight, 0), (down.weight, 1), (head.bias, 0)]
    theirs = [mine(parameter.grad, dim) for parameter, dim in whole]

    inputs = torch.randn(48, WIDTH, requires_grad=True)
    with wire() as sent:
        mlp(inputs).sum().backward()
    n, held = dist.get_world_size(), sum(parameter.nbytes for parameter in mlp.parameters())
    return [
        same("the loss, beside one process", [loss], [plain]),
        same("gradients of parts, beside one process", ours, theirs),
        count("bytes of the MLP held", held, 4 * ((2 * WIDTH + 1) * HIDDEN / n + WIDTH)),
        count("bytes sent by the MLP: two all-reduces", sent.bytes, 2 * 2 * (n - 1) / n * inputs.nbytes),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
