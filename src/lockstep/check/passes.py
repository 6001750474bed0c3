"""One forward and backward of a model, for comparison: what goes in, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.check.observe import Observed
from lockstep.comm.dtensor import is_dtensor
from lockstep.comm.tree import leaves, map_tensors
from lockstep.parallel.autocast import AutocastForward
from lockstep.parallel.pipeline.micro_batch import find_loss


@dataclass(frozen=True)
class ComparedBatch:
    """What the model is called with; where the loss is computed with ``loss_function(output, *targets)``, that too."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    loss_function: Callable[..., Tensor] | None = None
    targets: Sequence[object] = ()

    def detached(self, device: torch.device | None = None) -> ComparedBatch:
        """The same values apart from every graph, maybe on another device."""

        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().to(device or tensor.device).requires_grad_(tensor.requires_grad)

        args, kwargs, targets = map_tensors(copy, (tuple(self.args), self.kwargs, tuple(self.targets)))
        return replace(self, args=args, kwargs=kwargs, targets=targets)


@dataclass
class PassResult:
    """Of one pass; tensors in host memory, by path in the output or by name in the model."""

    loss: str | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    attributes: dict[str, object] = field(default_factory=dict)
    observed: Observed = field(default_factory=Observed)


def run_pass(
    call: Callable[[ComparedBatch], Any], batch: ComparedBatch, backward: Callable[[Tensor], None]
) -> PassResult:
    """Forward and backward: of the loss that the model returns, or else of a fixed combination of its outputs.

    Tensors that ranks hold parts of are gathered; collective then.
    """
    with torch.enable_grad():
        output = call(batch)
        found = {path: _whole(leaf) for path, leaf in leaves(output).items() if isinstance(leaf, Tensor)}
        path = find_loss(output)
        objective = found[path] if path is not None else _combination(found.values())
    result = PassResult(path, {path: leaf.detach().cpu() for path, leaf in found.items()})
    if objective is not None and objective.requires_grad:
        backward(objective)
    return result


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Forwards of prepared models compute in the type of their weights inside, whatever ``mixed_precision`` is."""
    changed = [module for module in model.modules() if isinstance(module, AutocastForward)]
    settings = [module._autocast_settings for module in changed]
    for module, (precision, device, options) in zip(changed, settings, strict=True):
        module._autocast_settings = (precision, device, replace(options, enabled=False))
    try:
        yield
    finally:
        for module, before in zip(changed, settings, strict=True):
            module._autocast_settings = before


def _whole(output: Any) -> Tensor:
    gathered: Tensor = output.full_tensor() if is_dtensor(output) else output
    return gathered


def _combination(outputs: Any) -> Tensor | None:
    """A mean of all numbers in the outputs, weighted by place."""
    terms = [
        (output * _weights(output)).sum() / math.sqrt(max(output.numel(), 1))
        for output in outputs
        if output.requires_grad and output.is_floating_point()
    ]
    return torch.stack([term.double() for term in terms]).sum() if terms else None


def _weights(like: Tensor) -> Tensor:
    """Numbers between -1 and 1 that follow no pattern of rows or columns."""
    places = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return torch.sin(places * places * 0.37 + places + 1).to(like.dtype).view(like.shape)
