"""Make a placed model run: stream what is offloaded, and move inputs between devices. It cannot be moved as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.comm.tree import leaves, send_to_device
from lockstep.errors import UsageError
from lockstep.model.blocks import find_blocks
from lockstep.offload import weights
from lockstep.offload.device_map.memory import for_streaming
from lockstep.offload.device_map.placement import CPU, TensorPlacement
from lockstep.offload.files.pages import file_mappings, is_in_file
from lockstep.offload.weights.groups import find_weight_groups
from lockstep.torch_internals import modules as torch_modules


def guard(model: nn.Module) -> None:
    """Refuse ``to``, ``cuda``, ``half`` and the like on ``model``, unless they would change nothing."""
    torch_modules.intercept_apply(model, partial(_apply_or_refuse, model))


def unguard(model: nn.Module) -> None:
    """Allow them again."""
    torch_modules.restore_apply(model)


def _apply_or_refuse(
    model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True, **_: object
) -> nn.Module:
    """Stand in for the one function that all of them go through."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(_changes_nothing(fn, device, dtype) for device, dtype in {(t.device, t.dtype) for t in tensors}):
        return model
    raise UsageError(
        f"{type(model).__name__} was placed by a device map and its weights are streamed, so it cannot be "
        "moved or converted. Pass device_map and dtype when loading it, or first call "
        "remove_hook_from_submodules(model)."
    )


def _changes_nothing(
    fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device, dtype: torch.dtype
) -> bool:
    # Four dimensions, so that another memory format shows in the strides.
    probe = torch.empty(2, 2, 2, 2, dtype=dtype, device=device)
    shared = probe.is_shared()
    try:
        result = fn(probe)
    except Exception:
        # Such as that there is no such device: then it would not have changed nothing.
        return False
    return (
        isinstance(result, torch.Tensor)
        and (result.device, result.dtype, result.stride()) == (device, dtype, probe.stride())
        and result.data_ptr() == probe.data_ptr()
        and result.is_shared() == shared
    )


def cross_devices(
    model: nn.Module,
    devices: Mapping[str, torch.device],
    main_device: torch.device,
    skip_keys: str | Iterable[str] | None = None,
) -> list[RemovableHandle]:
    """Attach the hooks.

    Args:
        devices: Name of a module -> where it computes.
        main_device: Where the model's own inputs go.
        skip_keys: Names of keyword arguments, and of entries of outputs, that stay where they are.
    """
    crossing = _ModelMover(main_device, skip_keys)
    # Also after an error, or a call around one that failed would take that one's device.
    handles = [model.register_forward_hook(crossing.after, with_kwargs=True, always_call=True)]
    for name, device in devices.items():
        if name:
            module = model.get_submodule(name)
            handles.append(
                module.register_forward_pre_hook(
                    _InputMover(device, skip_keys), prepend=True, with_kwargs=True
                )
            )
    # Prepended last, so it is the first to run.
    handles.append(model.register_forward_pre_hook(crossing.before, prepend=True, with_kwargs=True))
    return handles


class _InputMover:
    """Moves the inputs of one module."""

    def __init__(self, device: torch.device, skip_keys: str | Iterable[str] | None) -> None:
        self._device = device
        self._skip_keys = skip_keys if isinstance(skip_keys, str) else list(skip_keys or ())

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: object, kwargs: object) -> tuple[object, object]:
        return self.moved(args, kwargs)

    def moved(self, args: object, kwargs: object) -> tuple[object, object]:
        return send_to_device(args, self._device), send_to_device(
            kwargs, self._device, skip_keys=self._skip_keys
        )


class _ModelMover:
    """Moves the inputs and outputs of the model."""

    def __init__(self, device: torch.device, skip_keys: str | Iterable[str] | None) -> None:
        self._inputs = _InputMover(device, skip_keys)
        self._skip_keys = skip_keys if isinstance(skip_keys, str) else list(skip_keys or ())
        # One for each call that is under way.
        self._from: list[torch.device | None] = []

    @torch.compiler.disable
    def before(self, module: nn.Module, args: object, kwargs: object) -> tuple[object, object]:
        tensors = (leaf for leaf in leaves((args, kwargs)).values() if isinstance(leaf, torch.Tensor))
        self._from.append(next((tensor.device for tensor in tensors), None))
        return self._inputs.moved(args, kwargs)

    @torch.compiler.disable
    def after(self, module: nn.Module, args: object, kwargs: object, output: object) -> object:
        device = self._from.pop() if self._from else None
        if device is None or output is None:
            return output
        return send_to_device(output, device, skip_keys=self._skip_keys)


OFFLOADED = "_has_streamed_tensors"
"""Attribute of modules of which a tensor is streamed."""

_HANDLES = "_crossing_handles"


def attach(
    model: nn.Module,
    placements: list[TensorPlacement],
    main: torch.device,
    budget: int | None,
    entries: Sequence[str],
    undivided: Sequence[str],
    skip_keys: str | Iterable[str] | None,
    always_cross: bool,
) -> None:
    """Attach what a placed model needs.

    Args:
        placements: Of all tensors, which are where these say.
        main: Where streamed tensors are used.
        budget: Most bytes of weights there.
        entries: Names of the modules of the device map.
        undivided: Names of classes that are streamed whole.
        skip_keys: Arguments and outputs that stay on their device.
        always_cross: Move inputs and outputs even if all is on one device.

    Raises:
        OffloadError: the budget is too small.
    """
    streamed = _streamed(placements, main, budget)
    room = for_streaming(budget, placements, streamed, main)
    devices = {placement.execution for placement in placements} | {main}
    if streamed:
        names = {name for placement in streamed for name in placement.ref.names}
        groups = find_weight_groups(model, _blocks(model, undivided), names.__contains__)
        weights.stream_weights(model, groups, main, room)
        for module, _ in (holder for placement in streamed for holder in placement.ref.holders):
            module.__dict__[OFFLOADED] = True
    if len(devices) > 1 or always_cross or (streamed and main != CPU):
        if skip_keys is None:
            skip_keys = getattr(model, "_skip_keys_device_placement", None)
        model.__dict__[_HANDLES] = cross_devices(
            model, _module_devices(model, placements, entries), main, skip_keys
        )
    if is_dispatched(model):
        guard(model)


def detach(model: nn.Module) -> None:
    """Remove what ``attach`` attached; the model has then its tensors at rest."""
    unguard(model)
    for module in model.modules():
        module.__dict__.pop(OFFLOADED, None)
    for handle in model.__dict__.pop(_HANDLES, ()):
        handle.remove()
    weights.stop_streaming(model)


def is_dispatched(model: nn.Module) -> bool:
    """Return whether something is attached."""
    return _HANDLES in model.__dict__ or weights.streamer_of(model) is not None


def _streamed(
    placements: list[TensorPlacement], main: torch.device, budget: int | None
) -> list[TensorPlacement]:
    if main != CPU:
        return [
            placement
            for placement in placements
            if placement.is_offloaded and placement.execution == main and placement.ref.tensor.numel()
        ]
    # On the CPU, only what is mapped from a file takes less memory when it is not in use.
    mappings = file_mappings()
    mapped = [
        placement
        for placement in placements
        if placement.device == CPU and is_in_file(placement.ref.tensor, mappings)
    ]
    needed = sum(placement.ref.tensor.nbytes for placement in placements if placement.device == CPU)
    if any(placement.on_disk for placement in mapped) or (budget is not None and needed > budget):
        # With a budget, what is mapped for the CPU counts as well, and stays there as far as there is room.
        return [placement for placement in mapped if placement.on_disk or budget is not None]
    return []


def _blocks(model: nn.Module, undivided: Sequence[str]) -> dict[str, nn.Module]:
    """Return what is streamed whole: modules of the classes, and the usual blocks outside of these."""
    blocks = find_blocks(model)
    classes = set(undivided)
    called = {
        name: module
        for name, module in model.named_modules()
        if name and type(module).__name__ in classes and type(module).forward is not nn.Module.forward
    }
    if not called:
        return blocks
    chosen = blocks | called
    # A block within another one comes and goes with it.
    inner = {id(part) for module in chosen.values() for part in module.modules() if part is not module}
    return {name: module for name, module in chosen.items() if id(module) not in inner}


def _module_devices(
    model: nn.Module, placements: list[TensorPlacement], entries: Sequence[str]
) -> dict[str, torch.device]:
    """Return where each module that has tensors of its own computes, and each of the device map."""
    by_tensor = {id(placement.ref.tensor): placement.execution for placement in placements}
    devices = {}
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if name in entries and not own:
            own = [*module.parameters(), *module.buffers()]
        if own:
            devices[name] = by_tensor[id(own[0])]
    return devices
