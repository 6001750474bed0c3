"""Everything that depends on the shapes of a batch: what passes between stages, and the schedules for it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.tree import leaves, map_leaves, tensor_leaves
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.absent import (
    BoundaryBlock,
    Change,
    ReplayedBlock,
    ReplayedModule,
    changed,
    is_placeholder,
)
from lockstep.parallel.pipeline.exchange import Exchange, LocalBlock, PrecomputedBlock, for_itself
from lockstep.parallel.pipeline.layout import Layout
from lockstep.parallel.pipeline.micro_batch import BatchDims, Joined, ModelCall, find_loss, joined
from lockstep.parallel.pipeline.stage_forward import StageForward
from lockstep.parallel.pipeline.traced import RECEIVED, ModelTrace

CallSignature = tuple[object, ...]


def signature(call: ModelCall, *others: object) -> CallSignature:
    """Equal for calls that a plan serves alike. Tensors count by shape and dtype, plain values by value."""
    described: list[object] = []
    for path, leaf in leaves(call.tree).items():
        if isinstance(leaf, Tensor):
            described.append((path, tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, (bool, int, str, type(None))):
            described.append((path, leaf))
        else:
            described.append((path, type(leaf)))
    return (*described, *others)


def check_same_batch(call: ModelCall, group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks of the pipeline have been called with the same batch.

    Raises:
        UsageError: they were not.
    """
    text = "".join(map(str, signature(call)))
    # 48 bits, which float64 holds exactly: the digest and the sum of the values travel in one message.
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    real = [leaf.detach() for leaf in tensor_leaves(call.tree).values() if not leaf.is_complex()]
    sums = [leaf.double().nan_to_num().sum() for leaf in real]
    total = torch.stack(sums).sum() if sums else torch.zeros((), device=device)
    mine = torch.stack(
        [torch.tensor(float(digest), dtype=torch.float64, device=device), total.to(device).double()]
    )
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    if any(not torch.equal(other, every[0]) for other in every):
        raise UsageError(
            "The ranks of a pipeline got different batches, but each of them computes a part of the model for "
            "the same batch. Pass the loader to prepare()."
        )


@dataclass
class PipelinePlan:
    """How a batch of one signature goes through the pipeline."""

    traced: ModelTrace
    # Of the whole batch as one.
    whole: ModelTrace
    micro_batches: int
    # Of the arguments.
    dims: BatchDims
    # Path of the loss in the output; None: the loop computes it.
    loss: str | None
    # Where the last stage is.
    tail: Tail | None = None
    schedule: object = None
    evaluation: Any = None
    segments: dict[int, StageForward] = field(default_factory=dict)

    @staticmethod
    def of(traced: ModelTrace, whole: ModelTrace, micro_batches: int, dims: BatchDims) -> PipelinePlan:
        return PipelinePlan(traced, whole, micro_batches, dims, find_loss(traced.output))

    @cached_property
    def template(self) -> object:
        """The output with placeholders for tensors; objects that are no plain values are None."""

        def plain(_: str, leaf: object) -> object:
            return leaf if isinstance(leaf, (Tensor, bool, int, float, str)) else None

        return map_leaves(plain, self.traced.output)

    @cached_property
    def outputs(self) -> dict[str, Joined]:
        """Path -> how it is joined, of the tensors that the model returns.

        Raises:
            UsageError: one of them is not made by the last stage.
        """
        if self.traced.early:
            raise UsageError(
                f"The model returns at output{self.traced.early[0]} a tensor that was computed before the last "
                "stage of the pipeline. Tell the model not to return it (for transformers: "
                "output_hidden_states=False)."
            )
        whole = tensor_leaves(self.whole.output)
        return {
            path: joined(leaf, whole[path], self.micro_batches)
            for path, leaf in tensor_leaves(self.template).items()
        }

    def row_dim(self, block: str, path: str) -> int | None:
        """Return the dimension of the rows in what a block returns, or in what the last stage receives."""
        return row_dim(self.traced.shapes[block].get(path), self.whole.shapes[block].get(path))

    def has_tensors_without_rows(self, layout: Layout) -> bool:
        """Return whether such tensors come to what the last stage does after its blocks."""
        last = len(self.traced.cuts) - 1
        names = [name for name, block in layout.blocks.items() if block.stage == last]
        if exchanges(self.traced, last):
            names.append(RECEIVED)
        return any(self.row_dim(name, path) is None for name in names for path in self.traced.shapes[name])

    @property
    def by_rows(self) -> bool:
        """Whether the outputs of micro-batches, one after the other, are those of the batch."""
        return self.micro_batches == 1 or all(kind.by_rows for kind in self.outputs.values())

    def build_segments(self, model: nn.Module, layout: Layout, stages: list[int]) -> None:
        """Build one segment for each stage of this rank."""
        cuts = self.traced.cuts
        for stage in stages:
            exchange = exchange_of(model, layout, self.traced, stage)
            changes, own = stage_changes(layout, self.traced, stage, set(stages), exchange)
            following = cuts[stage + 1] if stage + 1 < len(cuts) else None
            first = next(iter(own.values()), None) if stage else None
            self.segments[stage] = StageForward(model, changes, first, following, own, exchange)
            if following is None:
                self.tail = Tail(model, layout, self, stage, set(stages))


class Tail:
    """What the last stage does after its last block, apart from its blocks, whose outputs are given to it."""

    def __init__(
        self, model: nn.Module, layout: Layout, plan: PipelinePlan, stage: int, local: set[int]
    ) -> None:
        self._model = model
        self._plan = plan
        self._own = {name: block.module for name, block in layout.blocks.items() if block.stage == stage}
        self._slots = {name: layout.blocks[name].slots for name in self._own}
        self._changes = stage_changes(layout, plan.whole, stage, local)[0]
        self._exchange = exchange_of(model, layout, plan.traced, stage)

    def joined(self, outputs: dict[str, list[object]]) -> dict[str, object]:
        """Return the outputs of each block for all micro-batches as one."""
        return {name: self._join_outputs(name, each) for name, each in outputs.items()}

    def _join_outputs(self, name: str, each: list[object]) -> object:
        found = [leaves(one) for one in each]

        def join(path: str, leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            values = [one[path] for one in found]
            # Rows are put one after the other. What has none (an auxiliary loss) counts as a mean over micro-batches.
            # Integers without rows are the same in all of them.
            dim = self._plan.row_dim(name, path)
            if dim is not None:
                return torch.cat(values, dim)
            is_mean = len(values) > 1 and leaf.is_floating_point()
            return torch.stack(values).mean(0) if is_mean else leaf

        return map_leaves(join, each[0])

    def run(self, call: ModelCall, outputs: dict[str, Any]) -> object:
        """Return the model's output for ``call``, the whole batch."""
        traced = self._plan.whole
        changes = list(self._changes)
        exchange = self._exchange
        received = [for_itself(one) for one in outputs.get(RECEIVED, ())]
        cut = traced.cuts[-1]
        # The blocks of this stage are not computed again: each gives back what all micro-batches together made.
        for name, block in self._own.items():
            assert block is not None
            arguments = dict(zip(cut.paths, received, strict=False)) if name == cut.block else {}
            given = PrecomputedBlock(name, block, outputs[name], traced.results[name], exchange, arguments)
            changes += [(entries, key, given) for entries, key in self._slots[name]]
        with changed(changes):
            if exchange is None:
                return self._model(*call.args, **call.kwargs)
            exchange.begin(received)
            with exchange:
                output = exchange.result(self._model(*call.args, **call.kwargs))
            exchange.begin(())
            return output


def row_dim(part: torch.Size | None, whole: torch.Size | None) -> int | None:
    """Return the dimension that has more entries for the batch than for a micro-batch."""
    if part is None or whole is None or len(part) != len(whole):
        return None
    # Micro-batches differ from the batch in their number of rows and in nothing else.
    return next((dim for dim, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b), None)


def exchanges(traced: ModelTrace, stage: int) -> bool:
    """Return whether a stage uses or sends more than arguments of first blocks."""
    use = traced.stages[stage]
    sources = traced.cuts[stage + 1].sources if stage + 1 < len(traced.cuts) else ()
    return bool(sources or use.fetches or use.between)


def exchange_of(model: nn.Module, layout: Layout, traced: ModelTrace, stage: int) -> Exchange | None:
    """Return what ``stage`` uses and sends beside arguments of first blocks; None: nothing."""
    if not exchanges(traced, stage):
        return None
    use = traced.stages[stage]
    sources = traced.cuts[stage + 1].sources if stage + 1 < len(traced.cuts) else ()
    title = type(model).__name__
    return Exchange(use.fetches, sources, layout.module_of_block, use.within, stage == 0, title)


def stage_changes(
    layout: Layout, traced: ModelTrace, stage: int, local: set[int], exchange: Exchange | None = None
) -> tuple[list[Change], dict[str, LocalBlock]]:
    """Return what modules the model has while ``stage`` runs, and the stage's own blocks among them."""
    changes: list[Change] = []
    begins: Mapping[int, str] = {index: name for name, index in layout.starts.items()}
    own_blocks: dict[str, LocalBlock] = {}
    for name, block in layout.blocks.items():
        call: nn.Module
        if block.stage == stage:
            if stage == 0 and exchange is None:
                # Nothing that it is called with is absent.
                continue
            assert block.module is not None
            cut = traced.cuts[stage] if stage and begins[stage] == name else None
            call = own_blocks[name] = LocalBlock(name, block.module, cut, exchange)
        # Before this stage: its results are placeholders, which the received tensors will take the places of.
        elif block.stage < stage:
            call = ReplayedBlock(name, block.copy, traced.results[name])
        # The first block of the next stage: the call of it ends this stage's forward.
        elif begins.get(stage + 1) == name:
            call = BoundaryBlock(name, block.copy)
        else:
            call = block.absent
        changes += [(entries, key, call) for entries, key in block.slots]
    # A rank with several stages has parts of all of them in the model; each stage may see its own alone.
    for name, part in layout.parts.items():
        own = stage in part.stages
        module = part.module if own else part.copy
        calls = traced.parts.get(name, [])
        if _is_replayable(calls, stage):
            module = ReplayedModule(module, calls[0][1])
        elif own or not part.stages & local:
            # It is there already.
            continue
        changes += [(entries, key, module) for entries, key in part.slots]
    return changes, own_blocks


def _is_replayable(calls: list[tuple[int, object]], stage: int) -> bool:
    """Return whether a part's only call was before ``stage`` and gave nothing real: operations on placeholders are
    slow."""
    if len(calls) != 1 or calls[0][0] >= stage:
        return False
    return all(is_placeholder(leaf) for leaf in leaves(calls[0][1]).values())
