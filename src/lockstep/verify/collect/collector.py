"""Looks on while a run trains, and hands each tensor of it to a sink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.dtensor import local
from lockstep.comm.tree import leaves
from lockstep.data.loader import PreparedLoader
from lockstep.model.changes import UncopiedHook
from lockstep.observe.run_observer import ObservedRun, RunObserver
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.train.whole.apply import on_shards
from lockstep.verify.collect.batch_position import BatchPosition
from lockstep.verify.collect.outputs import ModuleOutputs
from lockstep.verify.trace.items import ItemKind, TraceItem
from lockstep.verify.trace.regions import ShardAxes, region
from lockstep.verify.trace.sinks import Sink
from lockstep.verify.trace.sketch import row_digests


class RunCollector(RunObserver):
    """Of one process.

    Args:
        steps: Optimizer steps after which ``done`` is called.
        done: Ends the run; gets the number of steps that were made.
    """

    def __init__(self, sink: Sink, steps: int, done: Callable[[int], None]) -> None:
        self._sink = sink
        self._steps = steps
        self._done = done
        self._axes = ShardAxes()
        self._models: list[ParallelModel] = []
        self._run: ObservedRun | None = None
        self.place: BatchPosition = BatchPosition()
        self.made = 0
        self._outputs = ModuleOutputs(sink, self._item, self._add)
        self._backwards: Counter[tuple[object, ...]] = Counter()
        self._has_gradients = False
        self._was_clipped = False
        self._rates: dict[tuple[int, int], float] = {}
        self.rates_changed = False
        self._before: dict[str, Tensor] = {}
        self._known: set[str] = set()
        self._is_expected = False
        self._has_forward = False

    def attach(self, run: ObservedRun, place: BatchPosition, axes: ShardAxes) -> None:
        """Begin: ``place`` is where the run stands, ``axes`` which parts of a model this rank holds."""
        self._run = run
        self.place, self._axes = place, axes
        self._outputs.axes = axes
        place.on_batch = self._batch_comes

    @property
    def step(self) -> int:
        """The step that is being made, from 1."""
        return self.made + 1

    # What is prepared -------------------------------------------------------------------------------------

    def model_prepared(self, model: ParallelModel) -> None:
        prefix = _prefix(len(self._models))
        self._models.append(model)
        model.module.register_forward_pre_hook(_BeforeModel(self, model))
        model.module.register_forward_hook(_AfterModel(self))
        self._outputs.watch(model, prefix)
        self.place.prepared()

    def loader_prepared(self, loader: PreparedLoader) -> None:
        self.place.watch(loader)
        self.place.prepared()

    def optimizer_prepared(self, optimizer: Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            self._rates[id(optimizer), number] = float(group["lr"])
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        self.place.prepared()

    # A micro-batch ----------------------------------------------------------------------------------------

    def _batch_comes(self, batch: object) -> None:
        tensors = {path: value for path, value in leaves(batch).items() if isinstance(value, Tensor)}
        for path, value in tensors.items():
            self._add(self._item(ItemKind.BATCH, "", path=path), row_digests(value))
        self._outputs.batch_comes([tuple(value.shape) for value in tensors.values()])

    def forward_comes(self, model: ParallelModel) -> None:
        """Note that a prepared ``model`` is called, to be trained."""
        # A pipeline differentiates the script's own loss inside of this call.
        self._outputs.factor = 1.0
        self.place.forward_begins(model)

    def forward_ends(self) -> None:
        """Note that it has returned: a backward may follow."""
        self._has_forward = True

    def backward_begins(self, loss: Tensor, factor: Tensor | float) -> None:
        self._is_expected = True
        divided = self.place.divided
        # The loss that a rank would show; loss times factor stays what it is.
        self._backward_comes(
            loss if divided == 1 else loss * divided, factor if divided == 1 else factor / divided
        )

    def plain_backward(self, loss: Tensor) -> float | None:
        """Note a ``Tensor.backward`` of the script, or of ``Accelerator.backward``; see ``BackwardObserver``."""
        # One behind backward_begins is the same backward; one without a forward only tries what torch does.
        if self._is_expected or not self._has_forward:
            self._is_expected = False
            return None
        share = self.place.share
        self._backward_comes(loss, share)
        return share

    def _backward_comes(self, loss: Tensor, factor: Tensor | float) -> None:
        self._outputs.factor = factor
        self._has_forward = False
        self.place.backward_begins()
        where = (self.step, self.place.micro_batch, self.place.data_rank)
        call = self._backwards[where]
        self._backwards[where] += 1
        self._add(self._item(ItemKind.LOSS, "", call), loss)

    # A step -----------------------------------------------------------------------------------------------

    def before_clip(self) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            self._add_gradients(ItemKind.GRADIENT)

    def clipped(self, norm: Tensor | None) -> None:
        self._was_clipped = True
        if norm is not None:
            self._add(TraceItem(self.step, ItemKind.NORM, ""), norm)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        with on_shards(optimizer):
            self._step_begins(optimizer)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        with on_shards(optimizer):
            self._step_ends(optimizer)
        if self.made >= self._steps:
            self._done(self.made)

    def _step_begins(self, optimizer: Optimizer) -> None:
        self.before_clip()
        # Without clipping these are the gradients that are in the trace already.
        if self._was_clipped:
            self._add_gradients(ItemKind.CLIPPED)
        for number, group in enumerate(optimizer.param_groups):
            rate = torch.as_tensor(group["lr"], dtype=torch.float64)
            name = f"group {number}" if len(optimizer.param_groups) > 1 else ""
            known = self._rates.get((id(optimizer), number))
            self.rates_changed = self.rates_changed or known != float(rate)
            self._add(TraceItem(self.step, ItemKind.RATE, name), rate)
        for name, parameter in self._stepped(optimizer):
            if name not in self._known:
                self._known.add(name)
                self._add(TraceItem(0, ItemKind.WEIGHT, name), parameter)
            self._before[name] = local(parameter).detach().clone()

    def _step_ends(self, optimizer: Optimizer) -> None:
        for name, parameter in self._stepped(optimizer):
            before = self._before.pop(name, None)
            if before is not None:
                # In the memory of the copy: there is no third tensor of the parameter's size.
                update = before.neg_().add_(local(parameter).detach())
                self._add_part(TraceItem(self.step, ItemKind.UPDATE, name), update, parameter)
        self.made += 1
        self._has_gradients = self._was_clipped = False
        self.place.stepped()
        # Each rank has buffers of its own, and those of the first are saved.
        has_first = self.place.has_all_ranks or self.place.data_rank == 0
        for number, model in enumerate(self._models if has_first else ()):
            for name, buffer in model.plain.named_buffers():
                self._add(TraceItem(self.made, ItemKind.BUFFER, f"{_prefix(number)}{name}"), buffer)

    def _add_gradients(self, kind: ItemKind) -> None:
        # In about the order in which backward has made them.
        for name, parameter in reversed(list(self.named_parameters())):
            if parameter.grad is not None:
                self._add(TraceItem(self.step, kind, name), parameter.grad)

    def _stepped(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return ((name, p) for name, p in self.named_parameters() if id(p) in parameters)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the named parameters of all models."""
        if self._run is not None:
            next(iter(self._run.parameters_at_rest()), None)
        for number, model in enumerate(self._models):
            for name, tensor in model.named_parameters():
                yield f"{_prefix(number)}{name}", tensor

    # To the sink ------------------------------------------------------------------------------------------

    def _item(self, kind: ItemKind, name: str, call: int = 0, path: str = "") -> TraceItem:
        return TraceItem(self.step, kind, name, self.place.micro_batch, self.place.data_rank, call, path)

    def _add(self, item: TraceItem, tensor: Tensor, part: int = 0) -> None:
        found = region(tensor, self._sink.expected_shape(item), self._axes, part, self._outputs.rows)
        if found is not None:
            self._sink.add(item, local(tensor.detach()), *found)

    def _add_part(self, item: TraceItem, part: Tensor, whole: Tensor) -> None:
        """Add ``part``: what this rank holds, laid out as that of ``whole``."""
        found = region(whole, self._sink.expected_shape(item), self._axes)
        if found is not None:
            self._sink.add(item, part, *found)


def _prefix(number: int) -> str:
    """Return the prefix of names in a model."""
    return f"model_{number}." if number else ""


class _BeforeModel(UncopiedHook):
    """A forward pre-hook of a prepared model."""

    def __init__(self, collector: RunCollector, model: ParallelModel) -> None:
        self._collector = collector
        self._model = model

    def __call__(self, module: nn.Module, args: object) -> None:
        if torch.is_grad_enabled() and not torch_autograd.is_in_backward():
            self._collector.forward_comes(self._model)


class _AfterModel(UncopiedHook):
    """A forward hook of a prepared model."""

    def __init__(self, collector: RunCollector) -> None:
        self._collector = collector

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if torch.is_grad_enabled() and not torch_autograd.is_in_backward():
            self._collector.forward_ends()
