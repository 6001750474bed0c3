"""Gradients in files that are scaled by the step that reads them, or before anybody else looks at them.

Such a gradient has a class of its own, by which torch tells of every use: then it is scaled in its file, and becomes an
ordinary tensor again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from lockstep.comm.tree import Args, Kwargs, leaves
from lockstep.offload.files.direct import aligned_buffer
from lockstep.offload.optimizer.kernel import GradientScale
from lockstep.offload.optimizer.states import StepRegion, read_all, region_to_move, write_all
from lockstep.torch_internals import tensors as torch_tensors
from lockstep.torch_internals.dispatch import TorchFunction

_PENDING = "_offload_scale"


@dataclass
class _Pending:
    """``reads``: events after which steps have read the gradient as it is in its file."""

    scale: GradientScale
    reads: list[threading.Event] = field(default_factory=list)


class _Unscaled(torch.Tensor):
    """A gradient that is mapped from its file and is to be scaled before it is looked at."""

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func not in torch_tensors.TELLS_NO_VALUE:
            for tensor in leaves((args, kwargs)).values():
                if type(tensor) is cls:
                    _scale_now(tensor)
        with torch_tensors.functions_of_subclasses_disabled():
            return func(*args, **kwargs)


def scale_later(gradient: torch.Tensor, scale: GradientScale) -> None:
    """Have a gradient, a plain tensor in a file, scaled by the step, or when it is looked at."""
    vars(gradient)[_PENDING] = _Pending(scale)
    gradient.__class__ = _Unscaled


def scale_of(gradient: torch.Tensor) -> GradientScale | None:
    """Return what is still to be done to a gradient of any kind; None: nothing."""
    return vars(gradient)[_PENDING].scale if type(gradient) is _Unscaled else None


def as_in_file(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient, of any shape, as it is in its file, scaled or not: with the same memory and
    version.
    """
    if type(gradient) is not _Unscaled:
        return gradient
    with torch_tensors.functions_of_subclasses_disabled():
        return gradient.detach()


def is_read_until(gradient: torch.Tensor, read: threading.Event) -> None:
    """Keep a gradient as it is in its file until a step has read it."""
    if type(gradient) is _Unscaled:
        vars(gradient)[_PENDING].reads.append(read)


def ensure_scaled(gradient: torch.Tensor) -> None:
    """Scale it now, if that is still to be done: somebody looks at it of whom torch does not tell."""
    if type(gradient) is _Unscaled:
        _scale_now(gradient)


def forget(gradient: torch.Tensor) -> None:
    """Something else takes its place in the file."""
    if type(gradient) is _Unscaled:
        gradient.__class__ = torch.Tensor  # type: ignore[assignment]
        del vars(gradient)[_PENDING]


def _scale_now(gradient: torch.Tensor) -> None:
    pending: _Pending = vars(gradient)[_PENDING]
    for read in pending.reads:
        read.wait()
    # A plain tensor first: torch would tell of each use below otherwise.
    forget(gradient)
    region = region_to_move(gradient, changes=True)
    assert region is not None
    scale_in_file(region, pending.scale)


def scale_in_file(region: StepRegion, scale: GradientScale) -> None:
    """Read it, scale it and write it back, past the page cache."""
    buffer = aligned_buffer(region.nbytes)
    read_all([region], buffer)
    scale.apply([region.within(buffer)])
    write_all([region], buffer)
