"""Gradients of an open accumulation window that a script changes: they are each rank's own, and not averaged yet.

One process would change their sum over all rows. So a norm to clip by, a sign or a limit is another number here, and
what comes out is not what one process gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from lockstep.errors import UsageError
from lockstep.runtime.step import StepState
from lockstep.torch_internals.tensors import is_view, version


class _LeftGradient(NamedTuple):
    """A gradient as a backward left it; ``sums`` where its numbers are compared, too."""

    name: str
    gradient: torch.Tensor
    version: int
    sums: torch.Tensor | None


class OwnGradients:
    """Belongs to one ``Accelerator`` with several ranks.

    Versions tell of changes in every window (0.3 µs a gradient), sums of those through ``grad.data`` in the first one,
    the second, third, fifth, ninth, and so on.

    Args:
        gradients: (name, gradient) of each parameter whose gradient is this rank's own until the window ends.
    """

    def __init__(self, step: StepState, gradients: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._step = step
        self._gradients = gradients
        self._left: dict[str, _LeftGradient] = {}
        self._windows = 0
        self._is_in_window = False

    def forget(self) -> None:
        """Others take the place of what there was."""
        self._left.clear()

    @torch.no_grad()
    def after_backward(self) -> None:
        """Remember what this backward has left inside of a window."""
        self.forget()
        is_inside = self._step.is_in_window and not self._step.sync_gradients
        if is_inside and not self._is_in_window:
            self._windows += 1
        self._is_in_window = is_inside
        if not is_inside:
            return
        last = self._windows - 2
        sums_are_compared = last < 0 or last & (last - 1) == 0
        for name, gradient in self._gradients():
            sums = _sums(gradient) if sums_are_compared else None
            self._left[name] = _LeftGradient(name, gradient, version(gradient), sums)

    @torch.no_grad()
    def before_backward(self) -> None:
        """Raise UsageError if a gradient was changed since. One may be set to None: that is right on its own."""
        if not self._left:
            return
        for name, gradient in self._gradients():
            left = self._left.get(name)
            if left is None or not (_is_another(left, gradient) or _has_changed(left)):
                continue
            self.forget()
            raise UsageError(
                f"The gradient of '{name}' was changed inside of an accumulation window, where it is this rank's own: "
                "one process would change the sum over all ranks' rows. Change gradients where "
                "accelerator.sync_gradients is true, after the window's last backward; accelerator.clip_grad_norm_() "
                "and clip_grad_value_() wait for that."
            )


def _is_another(left: _LeftGradient, gradient: torch.Tensor) -> bool:
    """Set by the script: DDP too sets those that are views of its buckets."""
    return gradient is not left.gradient and not is_view(gradient)


def _has_changed(left: _LeftGradient) -> bool:
    return version(left.gradient) != left.version or (
        left.sums is not None and not torch.equal(_sums(left.gradient), left.sums)
    )


def _sums(gradient: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return torch.stack([values.sum(), values.abs().sum()]).nan_to_num()
