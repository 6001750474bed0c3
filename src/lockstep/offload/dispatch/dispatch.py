"""Place a model on the devices, in memory and on disk, and stream what is not where it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.errors import ConfigError, UsageError
from lockstep.offload import weights
from lockstep.offload.device_map.infer import infer_auto_device_map
from lockstep.offload.device_map.memory import MaxMemory, budget_of, class_names, get_balanced_memory
from lockstep.offload.device_map.placement import (
    assign_placements,
    check_device_map,
    main_device_of,
    undone_on_error,
)
from lockstep.offload.dispatch.attach import attach, detach, is_dispatched
from lockstep.offload.dispatch.loading import StrPath, load_checkpoint_in_model
from lockstep.offload.dispatch.module_hooks import remove_hook_from_module
from lockstep.offload.dispatch.storage import place_tensors
from lockstep.offload.files.pages import read_ahead

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def resolve_device_map(
    model: nn.Module,
    device_map: str | Mapping[str, object],
    max_memory: MaxMemory | None,
    no_split_module_classes: str | Iterable[str] | None,
    dtype: torch.dtype | str | None = None,
    offload_buffers: bool = False,
) -> dict[str, object]:
    """Return the device map that is meant: itself, or the one that a strategy's name stands for.

    Raises:
        ConfigError: there is no such strategy.
    """
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in STRATEGIES:
        raise ConfigError(
            f"device_map={device_map!r} is not one of {', '.join(STRATEGIES)}. Use one of them, or a mapping from "
            "modules to devices such as {'': 'cpu'}."
        )
    if device_map != "sequential":
        low_zero = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype, low_zero=low_zero)
    return dict(
        infer_auto_device_map(
            model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    )


def dispatch_model(
    model: nn.Module,
    device_map: str | Mapping[str, object],
    main_device: torch.device | str | int | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: StrPath | None = None,
    offload_index: Mapping[str, Mapping[str, object]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Iterable[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    force_hooks: bool = False,
    *,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    memory_budget: int | str | None = None,
) -> nn.Module:
    """Place a model's weights as a device map tells, and bring them to where they are used when the model runs.

    Weights on the disk, and with an accelerator also those on the CPU, are streamed: they are read ahead of their
    use, block by block, within a budget. The device map is kept as ``model.hf_device_map``.

    Args:
        model: The model, which is changed in place. After an error it is as it was before.
        device_map: Name of a module or tensor -> index of an accelerator, a device, ``"cpu"`` or ``"disk"``. Or
            ``"auto"`` or ``"balanced"`` (use all accelerators about equally), ``"balanced_low_0"`` (leave room on
            accelerator 0), or ``"sequential"`` (fill one after the other).
        main_device: The device on which streamed weights are used. None: the first accelerator of the map, or the
            CPU.
        state_dict: Name -> tensor of the shape of the model's: values that replace those of the model.
        offload_dir: The folder to which tensors for the disk are written. Tensors that are mapped from a checkpoint
            (``load_checkpoint_in_model``) stay in its file. Tensors without values are read from the folder.
        offload_index: Name -> entry with ``safetensors_file`` and ``weight_name``: files that have tensors for the
            disk. None: the index of ``offload_dir``.
        offload_buffers: Whether buffers are offloaded with the parameters beside them.
        skip_keys: Names of arguments and of entries of outputs that stay on their device. None: those that a
            transformers model asks for.
        preload_module_classes: Names of classes of modules whose weights are all needed when the module is called.
        force_hooks: Move inputs and outputs between devices even if the whole model is on one device.
        max_memory: Device -> bytes, as in ``get_max_memory``, for a device map by name. The bytes of the main device
            are the budget.
        no_split_module_classes: Names of classes of modules that stay whole, and are streamed as a whole.
        memory_budget: The most bytes of weights in the main device's memory at once, or a text such as ``"2GiB"``.

    Returns:
        ``model``.

    Raises:
        ConfigError: the device map or another argument is wrong.
        OffloadError: the budget is too small, the folder is full, or it has other weights.
        UsageError: the model is dispatched already, or has tensors without values.

    Examples:
        ```python
        import torch
        from lockstep import dispatch_model

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        model = dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir="offload")
        with torch.no_grad():
            output = model(torch.randn(2, 4))
        ```
    """
    _refuse_dispatched(model)
    resolved = resolve_device_map(
        model, device_map, max_memory, no_split_module_classes, offload_buffers=offload_buffers
    )
    check_device_map(model, resolved)
    main = main_device_of(resolved, main_device)
    placements = assign_placements(model, resolved, main, offload_buffers)
    budget = budget_of(memory_budget, max_memory, main, chosen_here=isinstance(device_map, str))
    with undone_on_error(model, detach):
        place_tensors(model, placements, state_dict, offload_dir, offload_index)
        attach(
            model,
            placements,
            main,
            budget,
            entries=list(resolved),
            undivided=[*class_names(no_split_module_classes), *class_names(preload_module_classes)],
            skip_keys=skip_keys,
            always_cross=force_hooks,
        )
    model.hf_device_map = resolved  # type: ignore[assignment]
    return model


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: StrPath,
    device_map: str | Mapping[str, object] | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    offload_folder: StrPath | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Iterable[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    memory_budget: int | str | None = None,
) -> nn.Module:
    """Load a checkpoint into a model and dispatch it: ``load_checkpoint_in_model`` and ``dispatch_model`` in one
    call.

    A model that was dispatched before is dispatched again.

    Args:
        model: The model, usually made under ``init_empty_weights``. It is changed in place. After an error its
            tensors are as they were before.
        checkpoint: A ``.safetensors`` or ``.bin`` file, the index of shards, or a folder with either.
        device_map: As in ``dispatch_model``. None: weights go to the CPU, and are not streamed without
            ``memory_budget``.
        max_memory: As in ``dispatch_model``.
        no_split_module_classes: As in ``dispatch_model``.
        offload_folder: The folder to which tensors for the disk are written that cannot be mapped from the
            checkpoint.
        offload_buffers: As in ``dispatch_model``.
        dtype: The dtype that floating-point tensors get. None: that of the model.
        offload_state_dict: Accepted, without effect: tensors are read one at a time.
        skip_keys: As in ``dispatch_model``.
        preload_module_classes: As in ``dispatch_model``.
        force_hooks: As in ``dispatch_model``.
        strict: Whether checkpoint and model must have the same tensors.
        full_state_dict: False is refused: each process maps the files itself.
        broadcast_from_rank0: True is refused, for the same reason.
        memory_budget: As in ``dispatch_model``.

    Returns:
        ``model``.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, does not fit the model, or lacks a tensor that has no
            values in the model either.
        ConfigError: the device map or another argument is wrong.
        OffloadError: the budget is too small, the folder is full, or it has other weights.
        UsageError: a module of the model is lazy, so that its shapes are not known yet.

    Examples:
        ```python
        import torch
        from lockstep import init_empty_weights, load_checkpoint_and_dispatch
        from safetensors.torch import save_file

        save_file(torch.nn.Linear(4, 1).state_dict(), "model.safetensors")
        with init_empty_weights():
            model = torch.nn.Linear(4, 1)
        model = load_checkpoint_and_dispatch(model, "model.safetensors", device_map="auto")
        output = model(torch.randn(2, 4))
        ```
    """
    chosen_here = isinstance(device_map, str)
    if device_map is not None:
        device_map = resolve_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers
        )
    detach(model)
    with undone_on_error(model, detach):
        load_checkpoint_in_model(
            model,
            checkpoint,
            device_map,
            offload_folder,
            dtype,
            bool(offload_state_dict),
            offload_buffers,
            strict=strict,
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
        )
        if device_map is None and memory_budget is None:
            _read_what_stays(model)
            return model
        device_map = {"": "cpu"} if device_map is None else device_map
        budget = budget_of(memory_budget, max_memory, main_device_of(device_map), chosen_here)
        dispatch_model(
            model,
            device_map,
            offload_dir=offload_folder,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            force_hooks=force_hooks,
            no_split_module_classes=no_split_module_classes,
            memory_budget=budget,
        )
    _read_what_stays(model)
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    *,
    memory_budget: int | str | None = None,
) -> nn.Module:
    """Keep all parameters of a model in the CPU's memory, and stream them to a device when the model runs.

    Args:
        model: The model, which is changed in place.
        execution_device: The device on which the model runs. None: that of its first parameter.
        offload_buffers: As in ``dispatch_model``.
        state_dict: Name -> tensor of the shape of the model's: values that replace those of the model.
        preload_module_classes: As in ``dispatch_model``.
        memory_budget: As in ``dispatch_model``.

    Returns:
        ``model``.

    Raises:
        ConfigError: an argument is wrong.
        OffloadError: the budget is too small.
        UsageError: the model is dispatched already, or has tensors without values.

    Examples:
        ```python
        import torch
        from lockstep import cpu_offload

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        x = torch.randn(2, 4)
        before = model(x)
        cpu_offload(model, execution_device="cpu")  # or 0, the first GPU
        assert torch.equal(model(x), before)
        ```
    """
    return _offload(
        model,
        "cpu",
        execution_device,
        offload_buffers=offload_buffers,
        state_dict=state_dict,
        preload_module_classes=preload_module_classes,
        memory_budget=memory_budget,
    )


def disk_offload(
    model: nn.Module,
    offload_dir: StrPath,
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Iterable[str] | None = None,
    *,
    memory_budget: int | str | None = None,
) -> nn.Module:
    """Keep all parameters of a model in files, and stream them to a device when the model runs.

    Args:
        model: The model, which is changed in place.
        offload_dir: The folder to which parameters are written. Parameters that are mapped from a file already stay
            there. Parameters without values are read from the folder.
        execution_device: The device on which the model runs. None: that of its first parameter.
        offload_buffers: As in ``dispatch_model``.
        preload_module_classes: As in ``dispatch_model``.
        memory_budget: As in ``dispatch_model``.

    Returns:
        ``model``.

    Raises:
        ConfigError: an argument is wrong.
        OffloadError: the budget is too small, the folder is full, or it has other weights.
        UsageError: the model is dispatched already, or has tensors without values.

    Examples:
        ```python
        import torch
        from lockstep import disk_offload

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        x = torch.randn(2, 4)
        before = model(x)
        disk_offload(model, "weights_on_disk", execution_device="cpu")
        assert torch.equal(model(x), before)
        ```
    """
    return _offload(
        model,
        "disk",
        execution_device,
        offload_dir=offload_dir,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        memory_budget=memory_budget,
    )


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Undo ``dispatch_model`` and remove all hooks from ``module`` and the modules below it.

    It is a plain model then. Its weights stay where they are kept, also those that are mapped from files.

    Examples:
        ```python
        import torch
        from lockstep import disk_offload
        from lockstep.hooks import remove_hook_from_submodules

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        disk_offload(model, "until_hooks_go", execution_device="cpu")
        remove_hook_from_submodules(model)
        assert not hasattr(model[0], "_hf_hook")
        ```
    """
    remove_hook_from_module(module, recurse=True)


def _offload(
    model: nn.Module, device: str, execution_device: torch.device | str | int | None, **options: Any
) -> nn.Module:
    """Call ``dispatch_model`` with all on one device, of which the model does not tell."""
    if execution_device is None:
        first = next(iter(model.parameters()), None)
        execution_device = "cpu" if first is None or first.is_meta else first.device
    had_map = getattr(model, "hf_device_map", None)
    dispatch_model(model, {"": device}, execution_device, **options)
    if had_map is None:
        del model.hf_device_map
    else:
        model.hf_device_map = had_map
    return model


def _read_what_stays(model: nn.Module) -> None:
    """Read weights that are mapped for the CPU's memory, so that the first forward need not."""
    if weights.streamer_of(model) is None:
        read_ahead(*(parameter for parameter in model.parameters() if parameter.device.type == "cpu"))


def _refuse_dispatched(model: nn.Module) -> None:
    if is_dispatched(model):
        raise UsageError(
            f"{type(model).__name__} was placed by a device map already. Call remove_hook_from_submodules(model) "
            "before it is placed again."
        )
