"""Inference with a model that is spread by depth, under the name that scripts import from ``accelerate.inference``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from torch import nn

from lockstep.config.parallel import Parallel
from lockstep.errors import UsageError
from lockstep.model.blocks import find_blocks
from lockstep.runtime import process
from lockstep.runtime.mesh import DeviceMeshes

if TYPE_CHECKING:
    pass

__all__ = ["prepare_pippy"]


def prepare_pippy(
    model: nn.Module,
    split_points: Literal["auto"] | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: Sequence[object] = (),
    example_kwargs: Mapping[str, object] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Return a model that is spread over all processes by depth, for inference.

    Call it on all processes under ``torch.no_grad()``. ``accelerator.prepare`` with ``parallel="pp=2"`` also trains.

    Args:
        model: The model. It is moved to this process's device, and put into evaluation mode.
        split_points: Names of the blocks at which the part of a process begins, without the first. ``"auto"``: parts
            have about equally many parameters.
        no_split_module_classes: Names of classes of blocks. None: blocks are found.
        example_args: Ignored: shapes are those of the first call.
        example_kwargs: Ignored, for the same reason.
        num_chunks: The number of parts into which a batch is cut. None: the number of processes.
        gather_output: Return the output on all processes. Otherwise the last process returns it, and the others None.

    Raises:
        UsageError: there is only one process, or the model cannot be split.

    Examples:
        ```python
        import torch
        from lockstep import debug_launcher
        from lockstep.inference import prepare_pippy

        def check() -> None:
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
            x = torch.ones(8, 4)
            with torch.no_grad():
                expected = model(x)
                model = prepare_pippy(model, gather_output=True)  # two layers on each process
                torch.testing.assert_close(model(x), expected)

        debug_launcher(check, num_processes=2)
        ```
    """
    from lockstep.parallel.pipeline import PipelineOptions, split_model

    runtime = process.start_runtime()
    mesh = DeviceMeshes(runtime, Parallel(pp=runtime.world_size)).axis("pp")
    if mesh is None:
        raise UsageError(
            "prepare_pippy spreads a model over processes, but this run has only one. Start several."
        )
    model = model.to(runtime.device).eval()
    options = PipelineOptions(
        micro_batches=num_chunks or 0,
        split=() if split_points == "auto" else tuple(split_points),
        outputs="all" if gather_output else "last",
    )
    blocks = find_blocks(model, tuple(no_split_module_classes or ()))
    return split_model(model, blocks, mesh, options, runtime.device)
