"""What modules return, and the gradients of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.comm.tree import leaves
from lockstep.model.changes import UncopiedHook
from lockstep.model.contents import is_ours
from lockstep.parallel.expert.layer import MixtureOfExperts
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.torch_internals import modules as torch_modules
from lockstep.verify.trace.items import ItemKind, TraceItem
from lockstep.verify.trace.regions import ShardAxes
from lockstep.verify.trace.sinks import Sink

AddPart = Callable[[TraceItem, Tensor, int], None]
"""Gets an item, what this rank has of it, and which micro-batch of a pipeline that is."""


class ModuleOutputs:
    """Of the modules of all prepared models.

    Args:
        item: Makes items of the micro-batch that is being trained on.

    Attributes:
        rows: Of the batch that is being trained on; 1: not known.
        factor: What the loss of this backward was multiplied by.
    """

    def __init__(self, sink: Sink, item: Callable[..., TraceItem], add: AddPart) -> None:
        self._sink = sink
        self._item = item
        self._add = add
        self._calls: Counter[tuple[object, ...]] = Counter()
        self._hooked = WeakTensorKeyDictionary()
        self._cut_in: tuple[int, ...] | None = None
        self._first_sizes: set[int] = set()
        self.axes = ShardAxes()
        self.rows = 1
        self.factor: Tensor | float = 1.0

    def batch_comes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Note that a batch of tensors of these shapes will be trained on."""
        self.rows = next((shape[0] for shape in shapes if shape), 1)
        self._first_sizes = {prod(shape[:dims]) for shape in shapes for dims in range(1, len(shape) + 1)}

    def watch(self, model: ParallelModel, prefix: str) -> None:
        """Look on at the modules of a model, whose names begin with ``prefix``."""
        for name, module in model.plain.named_modules():
            if not is_ours(module) or isinstance(module, MixtureOfExperts):
                module.register_forward_hook(_AfterModule(self, f"{prefix}{name}".rstrip("."), model))

    def come(self, name: str, output: object, model: ParallelModel) -> None:
        """Note that a module of ``model`` has returned ``output``."""
        part, is_cut = model.micro_batch, model.runs_micro_batches
        if part is None:
            return
        item = self._item(ItemKind.OUTPUT, name)
        batch = (item.step, item.micro_batch, item.data_rank)
        where = (batch, name, part)
        call = self._calls[where]
        self._calls[where] += 1
        for path, tensor in leaves(output).items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not _has_values(tensor):
                continue
            if is_cut and not tensor.ndim:
                # It is of one micro-batch of a pipeline alone, such as its loss.
                continue
            item = item._replace(call=call, path=path)
            if (is_cut or self.axes.cp[0] > 1) and not self._is_of_rows(item):
                continue
            self._add(item, tensor, part)
            cuts = self.axes.cuts_positions(tuple(tensor.shape), self._sink.expected_shape(item))
            if cuts:
                self._cut_in = batch
            if tensor in self._hooked:
                # Where it is passed on it may be another tensor, with a part of the gradient.
                continue
            self._hooked[tensor] = None
            if is_cut and tuple(tensor.shape) == self._sink.expected_shape(item):
                # It is of all rows, such as a bias of positions: a micro-batch has an addend of its gradient.
                continue
            # In front of what is cut along the sequence each rank has an addend of the gradient.
            if tensor.requires_grad and (cuts or self.axes.cp[0] == 1 or self._cut_in == batch):
                tensor.register_hook(_OnGradient(self, item._replace(kind=ItemKind.OUTPUT_GRADIENT), part))

    def _is_of_rows(self, item: TraceItem) -> bool:
        """Return whether a part of the batch has that part of an output; what goes to an expert has any rows."""
        expected = self._sink.expected_shape(item)
        if not expected or not self._first_sizes:
            return True
        return expected[0] == 1 or expected[0] in self._first_sizes

    def gradient_comes(self, item: TraceItem, gradient: Tensor, part: int) -> None:
        """Add the gradient of an output, of its shape; ``part``: which micro-batch of a pipeline."""
        factor, shape = self.factor, self._sink.expected_shape(item)
        if self.axes.cuts_positions(tuple(gradient.shape), shape):
            # Each of these ranks computes the whole loss, and the mean over them is taken of parameters' gradients.
            factor = factor * self.axes.cp[0]
        is_plain = isinstance(factor, (int, float)) and factor == 1
        self._add(item, gradient if is_plain else gradient / factor, part)


class _AfterModule(UncopiedHook):
    """A forward hook."""

    def __init__(self, outputs: ModuleOutputs, name: str, model: ParallelModel) -> None:
        self._outputs = outputs
        self._name = name
        self._model = model

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        # A block that is computed once more in backward was seen in its forward.
        if torch.is_grad_enabled() and not torch_autograd.is_in_backward() and not _is_fused(module):
            self._outputs.come(self._name, output, self._model)


class _OnGradient:
    """A hook of an output: its gradient comes."""

    def __init__(self, outputs: ModuleOutputs, item: TraceItem, part: int) -> None:
        self._outputs = outputs
        self._item = item
        self._part = part

    def __call__(self, gradient: Tensor) -> None:
        self._outputs.gradient_comes(self._item, gradient, self._part)


def _is_fused(module: nn.Module) -> bool:
    """Return whether tp splits each of several parts of a layer, such as query, key and value: ranks have no one
    region."""
    placements = getattr(torch_modules.parameters_of(module).get("weight"), "placements", None)
    return bool(placements and getattr(placements[-1], "split_factor", 1) > 1)


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")
