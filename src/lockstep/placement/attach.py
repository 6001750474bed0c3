"""Make a placed model run: stream what is offloaded, and move inputs between devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lockstep.parallel.blocks import find_blocks
from lockstep.placement.budget import for_streaming
from lockstep.placement.crossing import cross_devices
from lockstep.placement.guard import guard, unguard
from lockstep.placement.seats import CPU, Seat
from lockstep.placement.stored import FileBacked
from lockstep.stream.attach import stop_streaming, stream_weights, streamer_of
from lockstep.stream.units import find_units

OFFLOADED = "_has_streamed_tensors"
"""Attribute of modules of which a tensor is streamed."""

_HANDLES = "_crossing_handles"


def attach(
    model: nn.Module,
    seats: list[Seat],
    main: torch.device,
    budget: int | None,
    entries: Sequence[str],
    undivided: Sequence[str],
    skip_keys: str | Iterable[str] | None,
    always_cross: bool,
) -> None:
    """Attach what a placed model needs.

    Args:
        seats: Of all tensors, which are where these say.
        main: Where streamed tensors are used.
        budget: Most bytes of weights there.
        entries: Names of the modules of the device map.
        undivided: Names of classes that are streamed whole.
        skip_keys: Arguments and outputs that stay on their device.
        always_cross: Move inputs and outputs even if all is on one device.

    Raises:
        OffloadError: the budget is too small.
    """
    streamed = _streamed(seats, main, budget)
    room = for_streaming(budget, seats, streamed, main)
    devices = {seat.execution for seat in seats} | {main}
    if streamed:
        names = {name for seat in streamed for name in seat.place.names}
        units = find_units(model, _blocks(model, undivided), names.__contains__)
        stream_weights(model, units, main, room)
        for module, _ in (holder for seat in streamed for holder in seat.place.holders):
            module.__dict__[OFFLOADED] = True
    if len(devices) > 1 or always_cross or (streamed and main != CPU):
        if skip_keys is None:
            skip_keys = getattr(model, "_skip_keys_device_placement", None)
        model.__dict__[_HANDLES] = cross_devices(
            model, _module_devices(model, seats, entries), main, skip_keys
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
    stop_streaming(model)


def is_dispatched(model: nn.Module) -> bool:
    """Whether something is attached."""
    return _HANDLES in model.__dict__ or streamer_of(model) is not None


def _streamed(seats: list[Seat], main: torch.device, budget: int | None) -> list[Seat]:
    if main != CPU:
        return [
            seat
            for seat in seats
            if seat.is_offloaded and seat.execution == main and seat.place.tensor.numel()
        ]
    backed = FileBacked.now()
    mapped = [seat for seat in seats if seat.home == CPU and backed.holds(seat.place.tensor)]
    needed = sum(seat.place.tensor.nbytes for seat in seats if seat.home == CPU)
    if any(seat.on_disk for seat in mapped) or (budget is not None and needed > budget):
        # With a budget, what is mapped for the CPU counts as well, and stays there as far as there is room.
        return [seat for seat in mapped if seat.on_disk or budget is not None]
    return []


def _blocks(model: nn.Module, undivided: Sequence[str]) -> dict[str, nn.Module]:
    """What is streamed whole: modules of the classes, and the usual blocks outside of these."""
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
    inner = {id(part) for module in chosen.values() for part in module.modules() if part is not module}
    return {name: module for name, module in chosen.items() if id(module) not in inner}


def _module_devices(model: nn.Module, seats: list[Seat], entries: Sequence[str]) -> dict[str, torch.device]:
    """Where each module that has tensors of its own computes, and each of the device map."""
    by_tensor = {id(seat.place.tensor): seat.execution for seat in seats}
    devices = {}
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if name in entries and not own:
            own = [*module.parameters(), *module.buffers()]
        if own:
            devices[name] = by_tensor[id(own[0])]
    return devices
