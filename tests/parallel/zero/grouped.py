"""Models whose small blocks are gathered in groups, against the same models in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lockstep import Accelerator
from lockstep.model import find_blocks
from lockstep.parallel.zero import find_groups
from lockstep.utils import Parallel
from parallel.small_groups import groups_of

WIDTH, BLOCKS = 8, 5
BLOCK_BYTES = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)
ROOT_BYTES = 4 * 2 * WIDTH * WIDTH
LIMIT = 2 * BLOCK_BYTES
"""Two blocks, so that five make three groups."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class InOrder(nn.Module):
    """All blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.first(x)))

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Ordered(InOrder):
    """Blocks in the order of a list of numbers: left out, called again, or out of order."""

    order: tuple[int, ...] = ()

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.layers[number](x)
        return x


class Mixed(Ordered):
    order = (3, 0, 2, 1, 0, 4, 3)


class Branches(InOrder):
    """Two blocks of a group read the same input; the one that stands last may be unused in backward."""

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.layers[0](x), self.layers[1](x)
        kept = self.layers[2](one + other)
        self.layers[3](kept.detach())
        return kept


class ForALook(InOrder):
    """What the last block of a group returns is read, and no gradient comes back from it."""

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 2):
            x = self.layers[number](x)
            seen = self.layers[number + 1](x).detach().mean()
            x = x * (1 + 0 * seen)
        return self.layers[4](x)


class PartlyFrozen(InOrder):
    """One matrix of each block is trained."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.requires_grad_(False)


class Tied(InOrder):
    """Two blocks have a weight between them, so that they are in the root group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[1].up.weight


class TwoTypes(InOrder):
    """A frozen block in bfloat16 between those in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].bfloat16().requires_grad_(False)

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x.bfloat16()).float() if number == 1 else layer(x)
        return x


class Checkpointed(InOrder):
    """The script recomputes whole blocks, hooks and all."""

    reentrant = False

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class ReentrantlyCheckpointed(Checkpointed):
    reentrant = True


class CheckpointedPairs(InOrder):
    """Two blocks are recomputed at once, which are not those of a group."""

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for number in (1, 3):
            x = checkpoint(lambda x, n=number: self.layers[n + 1](self.layers[n](x)), x, use_reentrant=False)
        return x


MODELS: dict[str, tuple[type[nn.Module], list[int]]] = {
    "in order": (InOrder, [2, 2, 1]),
    "in any order": (Mixed, [2, 2, 1]),
    "branches": (Branches, [2, 2, 1]),
    "without a gradient at the last": (ForALook, [2, 2, 1]),
    "frozen in part": (PartlyFrozen, [2, 2, 1]),
    "tied": (Tied, [1, 2]),
    "two types": (TwoTypes, [1, 1, 2, 1]),
    "recomputed reentrantly": (ReentrantlyCheckpointed, [2, 2, 1]),
    "recomputed in pairs": (CheckpointedPairs, [2, 2, 1]),
}
"""Name -> the model, and how many blocks each of its groups has."""


def sizes_of(model: nn.Module, text: str = "zero=3", limit: int = LIMIT, is_cast: bool = False) -> list[int]:
    """How many blocks each group but the root has, in the order of the model."""
    parallel = Parallel.parse(text)
    with groups_of(limit):
        groups = find_groups(model, find_blocks(model, parallel.blocks), parallel, is_cast, is_main=False)
    assert groups[-1].modules == [model]
    return [len(group.modules) for group in groups[:-1]]


def rows_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def deviation(kind: str, parallel: str, accumulation: int = 1, **options: Any) -> float:
    """Of outputs and weights from those of one process, the largest after some steps."""
    torch.manual_seed(0)
    whole = MODELS[kind][0]()
    plain = copy.deepcopy(whole)
    accelerator = Accelerator(
        cpu=True, parallel=parallel, gradient_accumulation_steps=accumulation, **options
    )
    with groups_of(LIMIT):
        model, optimizer = accelerator.prepare(
            whole, torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
        )
    alone = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    ranks, rank, off = accelerator.num_processes, accelerator.process_index, 0.0
    for step in range(4 * accumulation):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows_of(step, rank)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        for other in range(ranks):
            (plain(rows_of(step, other)).square().mean() / ranks / accumulation).backward()
        if step % accumulation == accumulation - 1:
            alone.step()
            alone.zero_grad()
            with torch.no_grad():
                off = max(off, float((model(rows_of(99, 0)) - plain(rows_of(99, 0))).abs().max()))
    state = accelerator.get_state_dict(model)
    for name, value in plain.state_dict().items():
        off = max(off, float((state[name].float() - value.float()).abs().max()))
    accelerator.free_memory()
    return off


def deviations(parallel: str, kinds: list[str], accumulation: int = 1) -> dict[str, float]:
    torch.set_num_threads(1)
    return {kind: deviation(kind, parallel, accumulation) for kind in kinds}


# Counted ---------------------------------------------------------------------------------------------


def whole_bytes(model: nn.Module) -> int:
    """Of parameters that stand whole in the model now."""
    return sum(parameter.nbytes for parameter in model.parameters() if not isinstance(parameter, DTensor))


def counted(parallel: str, limit: int) -> dict[str, Any]:
    """Collectives and bytes of a step, and the most bytes of whole parameters in it, forward and backward."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = InOrder()
    with groups_of(limit):
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(whole_bytes(model))

    def look_in_both(module: object, args: object, output: torch.Tensor) -> None:
        look()
        if output.requires_grad:
            output.register_hook(look)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look_in_both)
    rows = rows_of(0, accelerator.process_index)
    with torch.no_grad(), accelerator.communication() as evaluation:
        model(rows)
    with accelerator.communication() as counter:
        accelerator.backward(model(rows).square().mean())
    optimizer.step()
    return {
        "evaluation": counts(evaluation),
        "step": counts(counter),
        "peak": max(seen),
        "at rest": whole_bytes(model),
    }


def counts(counter: Any) -> dict[str, tuple[float, float]]:
    """Of each collective: how many, and bytes that this rank sends. An all-gather may be n broadcasts."""
    names = {"broadcast": "all_gather", "all_to_all": "reduce_scatter"}
    found: dict[str, tuple[float, float]] = {}
    for one in counter.records:
        name = names.get(one.operation, one.operation)
        count, sent = found.get(name, (0.0, 0.0))
        part = 1 / one.group_size if one.operation == "broadcast" else 1
        found[name] = count + part, sent + float(one.wire_bytes)
    return found


# Calls of other kinds --------------------------------------------------------------------------------
