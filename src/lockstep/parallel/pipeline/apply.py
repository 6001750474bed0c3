"""Splitting a model by depth, and how long each block takes, by which stages can be balanced."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.comm.collectives import Communicator
from lockstep.config.parallel_words import stages_per_rank
from lockstep.config.values import join_names
from lockstep.errors import UsageError
from lockstep.model.blocks import find_blocks
from lockstep.parallel.pipeline.layout import Layout
from lockstep.parallel.pipeline.model import PipelineModel
from lockstep.parallel.pipeline.options import (
    SPLIT_BACKWARD,
    PipelineOptions,
    balanced,
    begin_at,
    rank_of_stage,
)
from lockstep.runtime import process
from lockstep.torch_internals.pipelining import splits_backward_exactly

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_model(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    mesh: DeviceMesh,
    options: PipelineOptions | None = None,
    device: torch.device | None = None,
) -> PipelineModel:
    """Return this rank's stages of ``model``. Blocks of other stages leave ``model`` at once.

    Parameters outside blocks stay on every rank until the first forward, which shows where they are used.

    Args:
        blocks: Of ``find_blocks``, in the order in which forward calls them.
        mesh: The ranks of the pipeline, one-dimensional.
        device: Where the model runs; None: where its first parameter is.

    Raises:
        UsageError: fewer blocks than stages, a stage without parameters, an unknown name in ``split``, or a schedule
            that splits backwards with a torch that gives wrong gradients then.
    """
    options = options or PipelineOptions()
    if options.schedule in SPLIT_BACKWARD and not splits_backward_exactly():
        raise UsageError(
            f"schedule='{options.schedule}' splits each backward in two, but torch {torch.__version__} then "
            "computes wrong gradients for a weight that is used twice. Use torch 2.13 or newer, or "
            "schedule='1f1b' or 'interleaved'."
        )
    ranks = mesh.size()
    stages = ranks * stages_per_rank(options.schedule, options.stages_per_rank)
    starts = _starts(model, blocks, stages, options)
    if device is None:
        device = next(nn.Module.parameters(model)).device
    layout = Layout(model, blocks, starts, device, options.forward_dtype)
    rank = mesh.get_local_rank()
    mine = {stage for stage in range(stages) if rank_of_stage(options.schedule, stage, ranks) == rank}
    layout.drop_blocks(mine)
    return PipelineModel(model, layout, mesh.get_group(), options, device)


def _starts(
    model: nn.Module, blocks: dict[str, nn.Module], stages: int, options: PipelineOptions
) -> list[int]:
    if len(blocks) < stages:
        raise UsageError(
            f"{type(model).__name__} has {len(blocks)} blocks ({join_names(blocks, most=4)}), but the pipeline has "
            f"{stages} stages, each of which needs at least one. Use fewer stages, or choose smaller blocks with "
            "blocks=... If it is a loss with parameters, prepare one module that calls the model, then "
            f"{type(model).__name__}."
        )
    names = list(blocks)
    split = options.split
    starts = begin_at(split, names, stages) if split else balanced(*_costs(model, blocks), stages)
    for stage, (start, end) in enumerate(zip(starts, [*starts[1:], len(names)], strict=True)):
        blocks_of_stage = names[start:end]
        if not any(True for name in blocks_of_stage for _ in blocks[name].parameters()):
            raise UsageError(
                f"Stage {stage} of the pipeline would hold {join_names(blocks_of_stage, most=4)}, which have no "
                "parameters. Choose other blocks with blocks=..., or begin stages at other blocks with split=..."
            )
    return starts


def _costs(model: nn.Module, blocks: dict[str, nn.Module]) -> tuple[list[float], float, float]:
    """Cost of each block, of what stands before the first and of what stands behind."""
    # Time is taken to grow with the weights that are multiplied by.
    costs = [float(sum(_bytes(p) for p in nn.Module.parameters(block))) for block in blocks.values()]
    inside = {id(p) for block in blocks.values() for p in nn.Module.parameters(block)}
    first = next(iter(blocks))
    before = after = 0.0
    seen_first = False
    for name, parameter in model.named_parameters(remove_duplicate=False):
        seen_first = seen_first or name.startswith(f"{first}.")
        if id(parameter) not in inside:
            before, after = (
                (before, after + _bytes(parameter)) if seen_first else (before + _bytes(parameter), after)
            )
    return costs, before, after


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


@torch.no_grad()
def block_seconds(
    model: nn.Module, blocks: Mapping[str, nn.Module], *args: object, repeats: int = 3, **kwargs: object
) -> dict[str, float]:
    """Return name -> seconds of a block's forward: the least of ``repeats`` runs of ``model(*args, **kwargs)`` on one
    device.

    Every rank must balance by the same numbers: measure on one.
    """
    least = dict.fromkeys(blocks, float("inf"))
    began: dict[str, float] = {}

    def now() -> float:
        # Kernels run behind Python: without waiting, only their launch would be timed.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(name: str) -> Callable[..., None]:
        return lambda *_: began.__setitem__(name, now())

    def end(name: str) -> Callable[..., None]:
        return lambda *_: least.__setitem__(name, min(least[name], now() - began[name]))

    handles = []
    for name, block in blocks.items():
        handles += [block.register_forward_pre_hook(begin(name)), block.register_forward_hook(end(name))]
    try:
        for _ in range(repeats):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return least


def measured_split(
    model: nn.Module,
    stages: int,
    *args: object,
    blocks: tuple[str, ...] = (),
    repeats: int = 3,
    **kwargs: object,
) -> tuple[str, ...]:
    """Measure on rank 0 the names for ``split=`` by which ``stages`` take about equally long. Collective.

    Call it before ``prepare``, on every rank, with one micro-batch as ``args`` and ``kwargs``.

    Args:
        blocks: As the word ``blocks`` of ``parallel``.

    Raises:
        UsageError: fewer blocks than stages.
    """
    found = find_blocks(model, blocks)
    if len(found) < stages:
        raise UsageError(
            f"{type(model).__name__} has {len(found)} blocks, which are too few for {stages} stages. Use fewer "
            "stages."
        )
    seconds = [block_seconds(model, found, *args, repeats=repeats, **kwargs)]
    Communicator(process.start_runtime()).broadcast_object_list(seconds)
    starts = balanced([seconds[0][name] for name in found], 0.0, 0.0, stages)
    names = list(found)
    return tuple(names[start] for start in starts[1:])
