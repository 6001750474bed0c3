"""Expert parallel: each process has some of the experts, and tokens travel to the expert that they chose.

    python examples/from_scratch/expert_parallel.py

A router sends each token through one of many small networks, the experts. Here they live on different processes. An
all-to-all brings every token to its expert, and another one brings the result back.

Papers: Lepikhin et al., GShard, ICLR 2021; Fedus et al., Switch Transformers, JMLR 2022.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_all_reduce import all_gather, all_reduce
from world import Check, count, run, same, share, wire

WIDTH, EXPERTS = 8, 8


class AllToAll(torch.autograd.Function):
    """Rows in order of destination to rows in order of origin.

    Backward takes the same way back.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        return all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_to_all(gradient, ctx.received, ctx.sent), None, None


def all_to_all(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """``sent[r]`` rows go to process r, and ``received[r]`` come from it."""
    me = dist.get_rank()
    outgoing = rows.contiguous().split(sent)
    incoming = [rows.new_empty(number, rows.shape[1]) for number in received]
    incoming[me] = outgoing[me]
    others = [rank for rank in range(dist.get_world_size()) if rank != me]
    works = [dist.isend(outgoing[rank], rank) for rank in others if sent[rank]]
    works += [dist.irecv(incoming[rank], rank) for rank in others if received[rank]]
    for work in works:
        work.wait()
    return torch.cat(incoming)


def new_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class PlainMixture(nn.Module):
    """Each token goes through one expert of all. Tokens are [n, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(new_expert() for _ in range(EXPERTS))

    def forward(self, tokens: Tensor) -> Tensor:
        # The gate multiplies the output: that is how the router gets a gradient.
        gate, chosen = self.router(tokens).softmax(-1).max(-1)
        return apply_experts(self.experts, tokens, chosen) * gate.unsqueeze(-1)


def apply_experts(experts: nn.ModuleList, rows: Tensor, chosen: Tensor) -> Tensor:
    """Each row through the expert that ``chosen`` [n] names."""
    outputs = torch.zeros_like(rows)
    for number, expert in enumerate(experts):
        outputs[chosen == number] = expert(rows[chosen == number])
    return outputs


class ExpertParallelMixture(nn.Module):
    """The same with EXPERTS / N experts on each process.

    Each process has tokens of its own.
    """

    def __init__(self, plain: PlainMixture) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.here = EXPERTS // self.size
        self.router = plain.router
        self.experts = plain.experts[self.rank * self.here : (self.rank + 1) * self.here]

    def forward(self, tokens: Tensor) -> Tensor:
        gate, chosen = self.router(tokens).softmax(-1).max(-1)

        # Nobody knows how many tokens will come, so the processes tell each other
        # first.
        counts = all_gather(chosen.bincount(minlength=EXPERTS)).view(self.size, self.size, self.here)
        sent = counts[self.rank].sum(-1).tolist()
        received = counts[:, self.rank].sum(-1).tolist()

        # Sorted by expert, tokens are sorted by process too.
        order = chosen.argsort(stable=True)
        arrived = AllToAll.apply(tokens[order], sent, received)
        # What comes is in order of origin, and from each process in order of these
        # experts.
        numbers = torch.arange(self.here).repeat(self.size)
        chosen_here = numbers.repeat_interleave(counts[:, self.rank].flatten())
        outputs = apply_experts(self.experts, arrived, chosen_here)
        back = AllToAll.apply(outputs, received, sent)

        self.rows_staying = sent[self.rank]
        self.rows_travelling = sum(sent) + sum(received) - 2 * self.rows_staying
        return torch.zeros_like(tokens).index_copy(0, order, back) * gate.unsqueeze(-1)


def demo(tokens_each: int = 32) -> list[Check]:
    size, rank = dist.get_world_size(), dist.get_rank()
    whole, split = PlainMixture(), ExpertParallelMixture(PlainMixture())
    tokens = torch.randn(size * tokens_each, WIDTH, generator=torch.Generator().manual_seed(1))
    tokens_here = share(tokens, rank, size).clone().requires_grad_()

    expected = whole(tokens.requires_grad_())
    expected.square().mean().backward()
    with wire() as sent:
        outputs = split(tokens_here)
        # The mean over all tokens is 1 / N of the sum of the processes' means.
        (outputs.square().mean() / size).backward()
    router_gradient = all_reduce(split.router.weight.grad)

    mine = slice(rank * split.here, (rank + 1) * split.here)
    ours = [parameter.grad for parameter in split.experts.parameters() if parameter.grad is not None]
    theirs = [parameter.grad for parameter in whole.experts[mine].parameters() if parameter.grad is not None]
    # Forward and backward: tokens, or their gradients, go out and come back. Counts are
    # integers of 8 bytes.
    travelling = 2 * split.rows_travelling * WIDTH * 4 + (size - 1) * EXPERTS * 8
    return [
        same("outputs, beside one process", [outputs], [share(expected, rank, size)]),
        same("gradients of the tokens", [tokens_here.grad], [share(tokens.grad, rank, size)]),
        same("gradients of the experts here", ours, theirs),
        same("the router's gradient", [router_gradient], [whole.router.weight.grad]),
        count("bytes sent: rows that travel, and counts", sent.bytes, travelling),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
