"""Inference with a model that is spread by depth, under the name that scripts import from ``accelerate.inference``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from lockstep.config.parallel import Parallel
from lockstep.errors import ConfigError, UsageError
from lockstep.model.blocks import find_blocks
from lockstep.offload.device_map.infer import infer_auto_device_map
from lockstep.runtime import process
from lockstep.runtime.mesh import DeviceMeshes
from lockstep.utils.modeling import calculate_maximum_sizes
from lockstep.utils.operations import copy_tensor_to_devices, ignorant_find_batch_size, pad_input_tensors

if TYPE_CHECKING:
    from torch.distributed.pipelining import ScheduleGPipe

__all__ = ["build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward", "prepare_pippy"]


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


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Any, Any] | None = None,
) -> dict[str, Any]:
    """Return a device map that gives each process about the same share of a model's bytes.

    Args:
        model: The model.
        num_processes: The number of processes.
        no_split_module_classes: Names of classes of modules that stay whole.
        max_memory: Number of a process -> bytes. None: equal shares.

    Returns:
        Name of a module or tensor -> number of a process. With one process: the device map of
        ``infer_auto_device_map``.

    Examples:
        ```python
        import torch
        from lockstep.inference import generate_device_map

        model = torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(4)))
        parts = generate_device_map(model, num_processes=2)
        assert set(parts.values()) == {0, 1}
        ```
    """
    if num_processes > 1 and max_memory is None:
        whole, (largest, _) = calculate_maximum_sizes(model)
        # A tenth more than a share, and room for the layer that does not fit behind the others.
        share = round((whole + largest) / num_processes * 1.1)
        max_memory = dict.fromkeys(range(num_processes), share)
    limits = None if num_processes == 1 else dict(max_memory or {})
    placed = infer_auto_device_map(
        model, max_memory=limits, no_split_module_classes=no_split_module_classes, clean_result=False
    )
    if num_processes == 1:
        return placed
    # What did not fit into equal shares is the last one's: processes have no disk for it.
    return {name: device if isinstance(device, int) else num_processes - 1 for name, device in placed.items()}


def find_pippy_batch_size(args: Sequence[object] | None, kwargs: Mapping[str, object] | None) -> int | None:
    """Return the batch size: n of the first tensor of shape [n, ...] among arguments. None: there is no such tensor.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Examples:
        ```python
        import torch
        from lockstep.inference import find_pippy_batch_size

        assert find_pippy_batch_size((), {"scale": 2, "x": torch.zeros(8, 4)}) == 8
        ```
    """
    found = map(ignorant_find_batch_size, (*(args or ()), *(kwargs or {}).values()))
    return next((size for size in found if size is not None), None)


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    num_chunks: int,
) -> ScheduleGPipe:
    """Return a schedule of ``torch.distributed.pipelining`` with this process's stage of a model. Call it on all
    processes.

    torch must be able to trace the model. ``prepare_pippy`` needs no tracing.

    Args:
        model: The model.
        split_points: Names of the modules at which stages begin, without the first.
        args: Positional arguments of a call with one chunk: tensors [rows / num_chunks, ...].
        kwargs: Keyword arguments of such a call.
        num_chunks: The number of chunks into which a batch is cut.

    Examples:
        ```python
        import torch
        from lockstep import debug_launcher
        from lockstep.inference import build_pipeline, pippy_forward

        def check() -> None:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
            x = torch.ones(8, 4)
            with torch.no_grad():
                expected = model(x)
                schedule = build_pipeline(model, ["1"], (x[:4],), {}, num_chunks=2)
                out = pippy_forward(schedule.step, 2, True, x)
            torch.testing.assert_close(out, expected)

        debug_launcher(check, num_processes=2)
        ```
    """
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    runtime = process.start_runtime()
    beginnings = dict.fromkeys(split_points, SplitPoint.BEGINNING)
    pipe = pipeline(model, mb_args=args, mb_kwargs=kwargs, split_spec=beginnings)
    return ScheduleGPipe(pipe.build_stage(runtime.rank, device=runtime.device), num_chunks)


def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: object, **kwargs: object
) -> Any:
    """Call the schedule of ``build_pipeline``. Rank 0 passes the inputs, and the last rank gets the output.

    Args:
        forward: The method ``step`` of the schedule. With one process, the model.
        num_chunks: The number of chunks. Inputs are padded with zeros to a multiple of it.
        gather_output: Return the output on all ranks.
        args: Positional arguments: tensors [rows, ...].
        kwargs: Keyword arguments.

    Raises:
        ValueError: no argument is a tensor with rows.

    Examples:
        ```python
        import torch
        from lockstep.inference import pippy_forward

        model = torch.nn.Linear(4, 1)  # one process calls it as it is
        assert pippy_forward(model, 2, False, torch.ones(8, 4)).shape == (8, 1)
        ```
    """
    runtime = process.start_runtime()
    output = None
    if runtime.world_size == 1:
        output = forward(*args, **kwargs)
    elif runtime.is_main:
        rows = find_pippy_batch_size(args, kwargs)
        if rows is None:
            raise ConfigError(
                "None of the arguments is a tensor, so there are no rows to cut into chunks. Pass a tensor."
            )
        if rows % num_chunks:
            args = pad_input_tensors(args, rows, num_chunks)
            kwargs = pad_input_tensors(kwargs, rows, num_chunks)
        forward(*args, **kwargs)
    elif runtime.is_last:
        output = forward()
    else:
        forward()
    return copy_tensor_to_devices(output) if gather_output else output
