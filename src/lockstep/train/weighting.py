"""Gradients of the weighted mean over a whole accumulation window and all ranks.

The mean of means, sum_i mean(loss_i) / k, is the big batch's mean only if all k micro-batches of all
ranks hold equally many samples or tokens. With weights w (the number of samples or tokens, or one
weight an element) the gradient here is exactly that of sum(w * loss) / sum(w).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from lockstep.comm.tree import StateDict
from lockstep.errors import UsageError
from lockstep.runtime.process import Runtime
from lockstep.torch_internals import optim as torch_optim


class WeightedMean:
    """Scales the losses of one accumulation window.

    The denominator is known only at the window's last micro-batch. Until then losses are divided by
    the first micro-batch's weight, so that gradients stay in fp16's range; then what was
    accumulated is rescaled, once.

    Args:
        agreed_divisor: Gradients may be averaged over ranks before the window ends, so until then
            all ranks must divide by the same number.

    Attributes:
        window_weight: This rank's sum of the weights so far, 0-d; None before the first.
        divisor: What losses are divided by until the window ends, 0-d.
        factor: What the latest weighted sum was multiplied by; 0-d.
    """

    def __init__(self, runtime: Runtime, agreed_divisor: bool = False) -> None:
        self._runtime = runtime
        self._agreed_divisor = agreed_divisor
        self.window_weight: torch.Tensor | None = None
        self.divisor: torch.Tensor | None = None
        self.factor: torch.Tensor | float = 1.0

    def load_state_dict(self, state: StateDict) -> None:
        """Go on with what this rank had."""
        for key in ("window_weight", "divisor"):
            setattr(self, key, state[key].to(self._runtime.device, copy=True))

    def scale(
        self,
        loss: torch.Tensor,
        weight: torch.Tensor | float,
        last: bool,
        gradients: Iterable[torch.Tensor],
        alone: bool = False,
    ) -> torch.Tensor:
        """Return the 0-d loss to call backward on. Collective when ``last``, unless ``alone``.

        Args:
            loss: 0-d mean loss, or a tensor of losses.
            weight: A number (what a 0-d ``loss`` is the mean of), or a tensor of ``loss``'s shape.
            last: This micro-batch ends the window.
            gradients: The tensors in which the window's gradients were accumulated.
            alone: The mean is over this rank's window only.

        Raises:
            UsageError: ``weight`` is negative or of another shape than ``loss``.
        """
        weights = _as_weights(loss, weight)
        batch_weight = weights.sum()
        first = self.window_weight is None
        if first:
            self.window_weight = torch.zeros_like(batch_weight)
            self.divisor = (
                torch.ones_like(batch_weight)
                if self._agreed_divisor
                else torch.where(batch_weight > 0, batch_weight, torch.ones_like(batch_weight))
            )
        assert self.window_weight is not None
        assert self.divisor is not None
        self.window_weight += batch_weight
        weighted = (loss * weights).sum()
        if not last:
            self.factor = 1 / self.divisor
            return weighted / self.divisor
        total = self.window_weight
        # Averaging divides gradients by the number of ranks, which is made good here.
        ranks = 1 if alone else self._runtime.world_size
        if ranks > 1:
            dist.all_reduce(total)
        # All weights 0: the gradient is 0, not NaN.
        factor = torch.where(total > 0, ranks / total, torch.zeros_like(total))
        if not first:
            # What was accumulated was divided by ``divisor``: times it, it is sum(w * loss) again.
            rescale(gradients, factor * self.divisor)
        self.factor = factor
        return weighted * factor


def _as_weights(loss: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
    """Return a weight for each element of ``loss``, in its shape and at least float32."""
    dtype = torch.promote_types(loss.dtype, torch.float32)
    if isinstance(weight, torch.Tensor):
        weights = weight.detach().to(device=loss.device, dtype=dtype)
    else:
        # Filled on the device, because a copy from here would wait for it.
        weights = torch.full((), float(weight), dtype=dtype, device=loss.device)
    # On an accelerator looking at the values would wait for it.
    if weights.device.type == "cpu" and bool((weights < 0).any()):
        raise UsageError(
            f"backward got weight={weight}. Weights count samples or tokens: pass 0 or more."
            if weights.dim() == 0
            else f"backward got {int((weights < 0).sum())} negative weights. Weights count samples or tokens: pass "
            "0 or more."
        )
    if weights.dim() == 0:
        if loss.numel() != 1:
            raise UsageError(
                f"backward got a loss of shape {tuple(loss.shape)} and one number as its weight. Pass the mean "
                "of the losses with the number of losses as weight, or pass one weight for each loss."
            )
        return weights.expand(loss.shape)
    if weights.shape != loss.shape:
        raise UsageError(
            f"backward got a loss of shape {tuple(loss.shape)} and weights of shape {tuple(weights.shape)}. Pass "
            "one number for the micro-batch, or unreduced losses (reduction='none') and a weight for each of "
            "them."
        )
    return weights


def rescale(gradients: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all by a 0-d factor, in place."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), group in groups.items():
        torch_optim.scale_in_place(group, factor.to(device=device, dtype=dtype))
