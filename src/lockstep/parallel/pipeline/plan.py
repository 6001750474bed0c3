"""Everything that depends on the shapes of a batch: what passes between stages, and the schedules for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.tree import leaves, map_leaves
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.absent import Instead, is_stand_in
from lockstep.parallel.pipeline.layout import Layout
from lockstep.parallel.pipeline.micro_batch import Call, Joined, find_loss, joined
from lockstep.parallel.pipeline.segment import (
    Change,
    Conversion,
    LocalBlock,
    NextStage,
    Replayed,
    ReplayedPart,
    Segment,
    changed,
)
from lockstep.parallel.pipeline.trace import Traced, Tracer

Signature = tuple[Any, ...]


def signature(call: Call, *others: Any) -> Signature:
    """Equal for calls that a plan serves alike. Tensors count by shape and dtype, plain values by value."""
    described: list[Any] = []
    for path, leaf in leaves(call.tree).items():
        if isinstance(leaf, Tensor):
            described.append((path, tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, (bool, int, str, type(None))):
            described.append((path, leaf))
        else:
            described.append((path, type(leaf)))
    return (*described, *others)


def check_same_batch(call: Call, group: dist.ProcessGroup, device: torch.device) -> None:
    """All ranks of the pipeline must have been called with the same batch.

    Raises:
        UsageError: they were not.
    """
    text = "".join(map(str, signature(call)))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    sums = [
        leaf.detach().double().nan_to_num().sum()
        for leaf in leaves(call.tree).values()
        if isinstance(leaf, Tensor) and not leaf.is_complex()
    ]
    total = torch.stack(sums).sum() if sums else torch.zeros((), device=device)
    mine = torch.stack(
        [torch.tensor(float(digest), dtype=torch.float64, device=device), total.to(device).double()]
    )
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    if any(not torch.equal(other, every[0]) for other in every):
        raise UsageError(
            "The ranks of a pipeline got different batches, but each of them works on a part of the model for the same "
            "batch. Pass the loader through prepare()."
        )


class _Traced(Instead):
    """Takes the place of a block while the model is traced."""

    def __init__(self, tracer: Tracer, name: str, block: nn.Module) -> None:
        super().__init__(block)
        self._call = tracer.block
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._name, self.replaced, args, kwargs)


def trace(
    model: nn.Module,
    layout: Layout,
    call: Call,
    loss_fn: Callable[..., Tensor] | None,
) -> Traced:
    """Runs ``model`` on a micro-batch without values of parameters. Random numbers are as before afterwards.

    Raises:
        UsageError: the forward cannot be cut into stages.
    """
    tracer = Tracer(
        layout.starts, layout.order, layout.outer, layout.stand_ins, layout.names, type(model).__name__
    )
    tracer.parts = {id(part.copy): name for name, part in layout.parts.items()}
    blocks = {name: _Traced(tracer, name, block.copy) for name, block in layout.blocks.items()}
    for module in [*(part.copy for part in layout.parts.values()), *blocks.values()]:
        module.train(model.training)
    devices = {leaf.device for leaf in leaves(call.tree).values() if isinstance(leaf, Tensor)}
    cuda = [device for device in devices if device.type == "cuda"]

    def forward() -> Any:
        output = model(*call.args, **call.kwargs)
        return output if loss_fn is None else (loss_fn(output, *call.targets),)

    with changed(layout.without_values(blocks)), torch.random.fork_rng(cuda), torch.enable_grad():
        return tracer.run(forward)


@dataclass
class Plan:
    """How a batch of one signature goes through the pipeline."""

    traced: Traced
    micro_batches: int
    rows: int  # of each micro-batch
    loss: str | None  # path of the loss in the output; None: the loop computes it
    schedule: Any = None
    evaluation: Any = None
    segments: dict[int, Segment] = field(default_factory=dict)

    @staticmethod
    def of(traced: Traced, micro_batches: int, rows: int) -> Plan:
        return Plan(traced, micro_batches, rows, find_loss(traced.output))

    @cached_property
    def template(self) -> Any:
        """The output with stand-ins for tensors; objects that are no plain values are None."""

        def plain(_: str, leaf: Any) -> Any:
            return leaf if isinstance(leaf, (Tensor, bool, int, float, str)) else None

        return map_leaves(plain, self.traced.output)

    @cached_property
    def outputs(self) -> dict[str, Joined]:
        """Path -> how it is joined, of the tensors that the model returns.

        Raises:
            UsageError: one of them cannot be joined, or is not made by the last stage.
        """
        if self.traced.early:
            raise UsageError(
                f"The model returns at output{self.traced.early[0]} a tensor that another stage than the last of the "
                "pipeline made. Ask the model not to return it (for transformers: output_hidden_states=False)."
            )
        return {
            path: joined(path, leaf, self.rows, self.micro_batches)
            for path, leaf in leaves(self.template).items()
            if isinstance(leaf, Tensor)
        }

    def build_segments(
        self, model: nn.Module, layout: Layout, stages: list[int], conversion: Conversion
    ) -> None:
        """One for each stage of this rank."""
        cuts = self.traced.cuts
        for stage in stages:
            changes, first = _changes(layout, self.traced, stage, set(stages))
            following = cuts[stage + 1] if stage + 1 < len(cuts) else None
            self.segments[stage] = Segment(model, changes, first, following, conversion)


def _changes(
    layout: Layout, traced: Traced, stage: int, local: set[int]
) -> tuple[list[Change], LocalBlock | None]:
    changes: list[Change] = []
    begins: Mapping[int, str] = {index: name for name, index in layout.starts.items()}
    first: LocalBlock | None = None
    for name, block in layout.blocks.items():
        call: nn.Module
        if block.stage == stage:
            if stage == 0:
                continue  # nothing that it is called with is absent
            assert block.module is not None
            cut = traced.cuts[stage] if begins[stage] == name else None
            call = LocalBlock(block.module, cut)
            first = call if cut is not None else first
        elif block.stage < stage:
            call = Replayed(name, block.copy, traced.results[name])
        elif begins.get(stage + 1) == name:
            call = NextStage(name, block.copy)
        else:
            call = block.absent
        changes += [(entries, key, call) for entries, key in block.slots]
    for name, part in layout.parts.items():
        own = stage in part.stages
        module = part.module if own else part.copy
        calls = traced.parts.get(name, [])
        if _is_replayable(calls, stage):
            module = ReplayedPart(module, calls[0][1])
        elif own or not part.stages & local:
            continue  # it is there already
        changes += [(entries, key, module) for entries, key in part.slots]
    return changes, first


def _is_replayable(calls: list[tuple[int, Any]], stage: int) -> bool:
    """Whether a part's only call was before ``stage`` and gave nothing real: operations on stand-ins are slow."""
    if len(calls) != 1 or calls[0][0] >= stage:
        return False
    return all(is_stand_in(leaf) for leaf in leaves(calls[0][1]).values())
