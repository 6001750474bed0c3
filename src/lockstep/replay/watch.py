"""Looks on at the modules of prepared models while a micro-batch is computed, and changes none of its bits."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lockstep.comm.tree import tensor_leaves
from lockstep.model.changes import UncopiedHook
from lockstep.replay.trace import GradientFault, GradientSize, Health, MicroBatchTrace, ModuleCall
from lockstep.torch_internals import autograd as torch_autograd

OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
LIBRARIES = (f"{os.sep}site-packages{os.sep}", OURS, os.path.dirname(torch.__file__), "<frozen", "runpy.py")


NodeGradients = tuple["Tensor | None", ...]


class ModuleWatch:
    """Fills a trace: ``begin`` hands it over, None: nobody looks on."""

    def __init__(self) -> None:
        self._trace: MicroBatchTrace | None = None
        self._open: list[int] = []

    def begin(self, trace: MicroBatchTrace | None) -> None:
        """Begin the trace of a micro-batch."""
        self._trace, self._open = trace, []

    def watch(self, model: nn.Module, prefix: str) -> None:
        """Look on at its modules, whose names begin with ``prefix``."""
        for name, module in model.named_modules():
            full = f"{prefix}{name}".rstrip(".")
            # Before all others, so that what they do is inside of the call.
            module.register_forward_pre_hook(_ForwardPreHook(self, full), prepend=True, with_kwargs=True)
            module.register_forward_hook(_ForwardHook(self), always_call=True)

    # -- forward -----------------------------------------------------------------------------------------

    def call_begins(self, name: str, module: nn.Module, inputs: object) -> None:
        trace = self._trace
        # A block under activation checkpointing is called again in backward, which is no call of the model's.
        if trace is None or torch_autograd.is_in_backward():
            return
        number, parent = len(trace.calls), self._open[-1] if self._open else None
        call = ModuleCall(name, type(module).__name__, parent, torch_autograd.next_sequence_number())
        call.inputs, _ = health(inputs)
        call.inputs_rms = rms(inputs)
        trace.calls.append(call)
        trace.order.append((number, False))
        self._open.append(number)
        _watch_gradients(trace, number, inputs, is_input=True)

    def call_ends(self, output: object) -> None:
        trace = self._trace
        if trace is None or not self._open or torch_autograd.is_in_backward():
            return
        number = self._open.pop()
        call = trace.calls[number]
        call.end = torch_autograd.next_sequence_number()
        call.outputs, call.health_text = health(output)
        call.rms = rms(output)
        trace.order.append((number, True))
        _watch_gradients(trace, number, output, is_input=False)

    # -- backward ----------------------------------------------------------------------------------------

    def backward_begins(self, loss: Tensor) -> None:
        """Look on at each operation of the backward of this loss, of any shape."""
        trace = self._trace
        if trace is None or loss.grad_fn is None:
            return
        trace.loss_line = trace.loss_line or line_of(loss.grad_fn)
        for node in torch_autograd.nodes_of(loss):
            node.register_hook(self._after_node(trace, node))

    def _after_node(
        self, trace: MicroBatchTrace, node: Node
    ) -> Callable[[NodeGradients, NodeGradients], None]:
        number, name, line = torch_autograd.sequence_number(node), node.name(), line_of(node)

        def after(passed_on: NodeGradients, got: NodeGradients) -> None:
            if trace.fault is None and _are_finite(got) and not _are_finite(passed_on):
                trace.fault = GradientFault(number, name, line)

        return after


class _ForwardPreHook(UncopiedHook):
    """A forward pre-hook."""

    def __init__(self, watch: ModuleWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, module: nn.Module, args: object, kwargs: object) -> None:
        self._watch.call_begins(self._name, module, (args, kwargs))


class _ForwardHook(UncopiedHook):
    """A forward hook."""

    def __init__(self, watch: ModuleWatch) -> None:
        self._watch = watch

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self._watch.call_ends(output)


def _watch_gradients(trace: MicroBatchTrace, number: int, value: object, is_input: bool) -> None:
    """Note how large the gradients of these tensors are, when they come."""
    for tensor in tensor_leaves(value).values():
        if tensor.requires_grad and tensor.is_floating_point():
            key = id(tensor.grad_fn) if tensor.grad_fn is not None else id(tensor)
            tensor.register_hook(_gradient_comes(trace, number, is_input, key))


def _gradient_comes(
    trace: MicroBatchTrace, number: int, is_input: bool, key: int
) -> Callable[[Tensor], None]:
    def comes(gradient: Tensor) -> None:
        size = rms(gradient)
        if size is not None:
            trace.gradients.append(GradientSize(number, is_input, key, size))

    return comes


def _numbers(value: object) -> list[Tensor]:
    found = tensor_leaves(value).values()
    return [t.detach() for t in found if (t.is_floating_point() or t.is_complex()) and not t.is_meta]


def health(value: object) -> tuple[Health, str]:
    """Return the health of all tensors in it, and in words how many of their elements are not finite."""
    worst, total, nans, infinite = Health.FINE, 0, 0, 0
    for tensor in _numbers(value):
        total += tensor.numel()
        finite = tensor.isfinite()
        if bool(finite.all()):
            continue
        nan = int(tensor.isnan().sum())
        nans += nan
        infinite += tensor.numel() - int(finite.sum()) - nan
        if nan or tensor.is_complex() or bool((tensor == float("inf")).any()):
            worst = Health.BAD
        elif bool(tensor[finite].any()) or not bool(finite.any()):
            worst = max(worst, Health.LOW)
    kinds = [*([f"{nans} NaN"] if nans else []), *([f"{infinite} infinite"] if infinite else [])]
    return worst, f"{' and '.join(kinds)} of {total} elements" if kinds else ""


def rms(value: object) -> float | None:
    """Return the root mean square of all tensors in it; None: not finite, or no numbers."""
    tensors = [tensor for tensor in _numbers(value) if tensor.numel()]
    if not tensors:
        return None
    # In double precision: squares of large numbers overflow fp32, and half types before.
    total = sum(float(tensor.abs().double().square().sum()) for tensor in tensors)
    size = (total / sum(tensor.numel() for tensor in tensors)) ** 0.5
    return size if size - size == 0 else None


def in_words(batch: object) -> str:
    """Return which tensors of a batch are not finite, and in which rows; "": none."""
    found = []
    for path, tensor in tensor_leaves(batch).items():
        if not (tensor.is_floating_point() or tensor.is_complex()) or health(tensor)[0] is Health.FINE:
            continue
        bad = ~tensor.isfinite()
        rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist() if tensor.ndim else []
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        found.append(
            f"{path or 'its tensor'} has {health(tensor)[1]}" + (f", in rows {shown}" if rows else "")
        )
    return "; ".join(found)


def _are_finite(gradients: NodeGradients) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


def line_of(node: object) -> str:
    """Return the innermost line outside of libraries that made a node; "": not known."""
    for entry in reversed(torch_autograd.traceback_of(node)):
        if not any(part in entry for part in LIBRARIES):
            place, _, code = entry.strip().partition("\n")
            return f"{place.strip()}: {code.strip().splitlines()[0]}" if code.strip() else place.strip()
    return ""
