"""The trace of a call of a model: which arguments it uses, and what passes between its stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.comm.tree import LossFunction, tensor_leaves
from lockstep.model.blocks import joined_name
from lockstep.parallel.pipeline.absent import ReplacementModule, changed
from lockstep.parallel.pipeline.layout import Layout
from lockstep.parallel.pipeline.micro_batch import ModelCall
from lockstep.parallel.pipeline.state import restored
from lockstep.parallel.pipeline.trace import Tracer
from lockstep.parallel.pipeline.traced import ModelTrace, storage_of
from lockstep.runtime.seed import generators_kept
from lockstep.torch_internals.fake import quiet


class _TracedBlock(ReplacementModule):
    """Takes the place of a block while the model is traced."""

    def __init__(self, tracer: Tracer, name: str, block: nn.Module) -> None:
        super().__init__(block)
        self._call = tracer.block
        self._name = name

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._call(self._name, self.replaced, args, kwargs)


def trace_model(
    model: nn.Module,
    layout: Layout,
    call: ModelCall,
    loss_fn: LossFunction | None,
    like: ModelTrace | None = None,
) -> ModelTrace:
    """Runs ``model`` on a micro-batch without values of parameters. Random numbers are as before afterwards.

    ``like``: a run on other rows. Blocks that computed the same in it are taken to return equal shapes in this one.

    Raises:
        UsageError: the forward cannot be cut into stages.
    """
    tracer = _tracer(model, layout)
    replays = tracer.replay_equal_blocks()
    if like is not None:
        tracer.alike = lambda name, _: like.operations.get(name)
    try:
        traced = _run(tracer, model, layout, call, loss_fn)
        traced.operations = replays.operations(traced.output)
        return traced
    # A block that was taken to be like another may be the one that fails.
    except Exception:
        # A user's forward may raise anything; every block is traced to see whether it is right.
        if not replays.count and not tracer.followed:
            raise
    return trace_every_block(model, layout, call, loss_fn)


def trace_every_block(
    model: nn.Module, layout: Layout, call: ModelCall, loss_fn: LossFunction | None
) -> ModelTrace:
    """The same, whether blocks are equal or not."""
    return _run(_tracer(model, layout), model, layout, call, loss_fn)


def used_arguments(
    model: nn.Module, layout: Layout, call: ModelCall, loss_fn: LossFunction | None
) -> set[str] | None:
    """Paths of the arguments that a forward without values uses; None: it raises, as where shapes do not fit."""
    tracer = _tracer(model, layout)
    known: dict[int, str] = {}

    def alike(_: str, block: nn.Module) -> str:
        if id(block) not in known:
            attributes = (value for module in block.modules() for value in vars(module).values())
            shapes = [tuple(value.shape) for value in attributes if isinstance(value, Tensor)]
            known[id(block)] = f"{block!r}{shapes}"
        return known[id(block)]

    tracer.alike = alike
    for path, leaf in tensor_leaves(call.tree).items():
        # By storage, so that a view of an argument counts as a use of it.
        tracer.inputs.setdefault(storage_of(leaf), set()).add(path)
    try:
        with quiet():
            _run(tracer, model, layout, call, loss_fn)
    except Exception:
        # A user's forward may raise anything.
        return None
    return tracer.used


def _tracer(model: nn.Module, layout: Layout) -> Tracer:
    return Tracer(
        layout.starts, layout.order, layout.outer, layout.placeholders, layout.names, type(model).__name__
    )


def _run(
    tracer: Tracer, model: nn.Module, layout: Layout, call: ModelCall, loss_fn: LossFunction | None
) -> ModelTrace:
    """The forward with blocks traced and no values anywhere; modules and generators are left as they were."""
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
