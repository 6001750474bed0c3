"""The trace of a call of a model: what passes between its stages."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.comm.tree import LossFunction
from lockstep.model.blocks import joined_name
from lockstep.parallel.pipeline.absent import ReplacementModule, changed
from lockstep.parallel.pipeline.layout import Layout
from lockstep.parallel.pipeline.micro_batch import ModelCall
from lockstep.parallel.pipeline.state import restored
from lockstep.parallel.pipeline.trace import Tracer
from lockstep.parallel.pipeline.traced import ModelTrace, storage_of
from lockstep.runtime.seed import generators_kept


class _TracedBlock(ReplacementModule):
    """Takes the place of a block while the model is traced."""

    def __init__(self, tracer: Tracer, name: str, block: nn.Module) -> None:
        super().__init__(block)
        self._call = tracer.block
        self._name = name

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._call(self._name, self.replaced, args, kwargs)


def trace_model(
    model: nn.Module, layout: Layout, call: ModelCall, loss_fn: LossFunction | None
) -> ModelTrace:
    """Run ``model`` with blocks traced and no values of parameters; modules and generators are left as they were.

    Raises:
        UsageError: the forward cannot be cut into stages.
    """
    tracer = Tracer(
        layout.starts, layout.order, layout.outer, layout.placeholders, layout.names, type(model).__name__
    )
    # Placeholders stand for all parameters, so one that still appears was kept outside of the modules.
    tracer.real = {storage_of(parameter): name for name, parameter in model.named_parameters()}
    tracer.parts = {id(part.copy): name for name, part in layout.parts.items()}
    tracer.kept = [
        (joined_name(name, path), inner)
        for name, block in layout.blocks.items()
        for path, inner in block.copy.named_modules()
    ]
    blocks = {name: _TracedBlock(tracer, name, block.copy) for name, block in layout.blocks.items()}
    for module in [*(part.copy for part in layout.parts.values()), *blocks.values()]:
        module.train(model.training)

    def forward() -> object:
        output = model(*call.args, **call.kwargs)
        return output if loss_fn is None else (loss_fn(output, *call.targets),)

    copies = [part.copy for part in layout.parts.values()] + [block.copy for block in layout.blocks.values()]
    inner = [("", module) for copy in copies for module in copy.modules()]
    # The trace must leave nothing behind: neither state of modules, nor the modules in place of blocks, nor draws.
    with (
        restored(inner),
        changed(layout.without_values(blocks)),
        generators_kept(),
        torch.enable_grad(),
    ):
        return tracer.run(forward)
