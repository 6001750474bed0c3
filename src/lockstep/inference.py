"""Inference with a model that is spread by depth, under the name that scripts import from ``accelerate.inference``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from lockstep.config.parallel import Parallel
from lockstep.errors import UsageError
from lockstep.model.blocks import find_blocks
from lockstep.runtime import process
from lockstep.runtime.mesh import DeviceMeshes


def prepare_pippy(
    model: nn.Module,
    split_points: Literal["auto"] | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: Sequence[object] = (),
    example_kwargs: Mapping[str, object] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """The model with its blocks spread over all processes, to be called on all of them under ``torch.no_grad()``.

    Args:
        split_points: Names of the blocks at which a process's part begins, without the first; "auto" balances.
        no_split_module_classes: Classes of blocks that stay whole; None: found.
        example_args, example_kwargs: Not needed: shapes are those of the first call.
        num_chunks: Parts of a batch that are under way at once; None: as many as there are processes.
        gather_output: All processes get the output; else the last one, and None the others.

    Raises:
        UsageError: one process only, or a model that cannot be split.
    """
    from lockstep.parallel.pipeline import PipelineOptions, split_model

    runtime = process.start()
    mesh = DeviceMeshes(runtime, Parallel(pp=runtime.world_size)).axis("pp")
    if mesh is None:
        raise UsageError("prepare_pippy spreads a model over processes, but there is one. Start several.")
    model = model.to(runtime.device).eval()
    options = PipelineOptions(
        micro_batches=num_chunks or 0,
        split=() if split_points == "auto" else tuple(split_points),
        outputs="all" if gather_output else "last",
    )
    blocks = find_blocks(model, tuple(no_split_module_classes or ()))
    return split_model(model, blocks, mesh, options, runtime.device)
