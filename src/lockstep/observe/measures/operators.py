"""What operators compute and send, seen by a dispatch mode that looks on for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.comm import counter
from lockstep.torch_internals import dispatch, flops
from lockstep.torch_internals.autograd import is_in_backward


@dataclass
class OperatorCounts:
    """Of this rank.

    Attributes:
        model: Floating-point operations of forwards and backwards; a product of [m, k] and [k, n] is 2 m k n.
        again: Those of forwards that are computed again for a backward.
        unknown: Operators of which nobody knows how much they compute.
    """

    model: int = 0
    again: int = 0
    unknown: set[str] = field(default_factory=set)


class OperatorCounter(dispatch.TorchDispatchMode):
    """Adds to ``counts`` what the operators inside compute and send. Costs some microseconds an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = OperatorCounts()
        flops.probe()
        self._formulas = flops.formulas()
        self._attention_backwards = set(dispatch.operators_of(flops.ATTENTION_BACKWARDS))
        self._without = set(dispatch.operators_of(flops.WITHOUT_FORMULA))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if any(hasattr(kind, "device_mesh") for kind in types):
            # Operators on the parts of a DTensor come by themselves.
            return NotImplemented
        result = func(*args, **kwargs)
        if any(hasattr(kind, "fake_mode") or kind.__name__ == "FakeTensor" for kind in types):
            # It is of a stage that another rank computes.
            return result
        packet = func.overloadpacket
        if dispatch.schema_of(func).name in counter.OPERATORS:
            # It sends, and computes nothing.
            return result
        if packet in self._attention_backwards or packet in self._formulas:
            try:
                self._applies(packet, args, kwargs, result)
            except Exception:
                # The formula does not know the arguments, such as nested tensors.
                self.counts.unknown.add(dispatch.schema_of(func).name)
        elif packet in self._without or (func.namespace not in flops.HARMLESS and _multiplies(args)):
            self.counts.unknown.add(dispatch.schema_of(func).name)
        return result

    def _applies(
        self, packet: object, args: tuple[Any, ...], kwargs: dict[str, object], result: object
    ) -> None:
        if packet in self._attention_backwards:
            self._attends_back(*args[:4])
        else:
            self._computes(int(self._formulas[packet](*args, **kwargs, out_val=result)))

    def _computes(self, operations: int) -> None:
        # An ordinary backward runs without gradients; what is computed with them inside of one is a forward again.
        if torch.is_grad_enabled() and is_in_backward():
            self.counts.again += operations
        else:
            self.counts.model += operations

    def _attends_back(
        self, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        forward = flops.of_attention(query, key, value)
        width, width_of_values = query.shape[-1], value.shape[-1]
        self._computes(2 * forward)
        # The kernel computes q k^T again: of the forward's two products the share d / (d + d_v).
        self.counts.again += forward * width // (width + width_of_values)


def _multiplies(args: tuple[object, ...]) -> bool:
    """Return whether an operator of somebody else's takes two floating-point tensors with rows and columns."""
    matrices = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point() and a.dim() >= 2]
    return len(matrices) >= 2
