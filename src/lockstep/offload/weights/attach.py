"""Stream a model's weights while it runs: hooks on its modules tell a streamer, and others, when a group is used."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lockstep.comm.tree import leaves
from lockstep.errors import OffloadError, UsageError
from lockstep.model.changes import UncopiedHook
from lockstep.offload.weights.groups import WeightGroup
from lockstep.offload.weights.mover import MappedMover, Mover, least_budget
from lockstep.offload.weights.streamer import Streamer
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import tensors as torch_tensors


class GroupListener(Protocol):
    """What is told of a group's use, in the thread that computes.

    Begins and ends are nested as modules are, and a group of several modules may begin while it is in use.
    An exception in ``forward_begins`` or ``backward_begins`` ends the forward or backward pass.
    """

    def forward_begins(self, group: WeightGroup) -> None: ...

    def forward_ended(self, group: WeightGroup) -> None:
        """End the forward, also after an exception in it, even if that was raised before ``forward_begins``."""

    def backward_begins(self, group: WeightGroup) -> None:
        """Gradients of the group's outputs are known; once for each forward in each backward."""


class RemovableHandles:
    """Hooks that are removed together."""

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles = list(handles)

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the model has no such hooks.
        return RemovableHandles, ((),)


def listen(
    model: nn.Module, groups: Sequence[WeightGroup], listeners: Sequence[GroupListener]
) -> RemovableHandles:
    """Tell ``listeners``, in their order, when the forward or backward of a group begins or has ended.

    The hooks run before and after all others, are not compiled by torch.compile, and a copy of the model
    (deepcopy, pickle) has none that do anything.
    """
    handles = []
    for group in groups:
        begin, end = _BeginHook(group, tuple(listeners)), _EndHook(group, tuple(listeners))
        for module in group.modules:
            handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(end, with_kwargs=True, always_call=True))
    return RemovableHandles(handles)


class StreamingHook(UncopiedHook):
    """A forward hook, or forward pre-hook, that is not compiled, and of which nothing is left in a copy of its model.

    Subclasses have ``run``, which takes what torch calls the hook with.
    """

    def __init__(self) -> None:
        self._run = _uncompiled()

    def __call__(self, *args: object) -> None:
        self._run(self, *args)

    def run(self, *args: object) -> None:
        raise NotImplementedError


@functools.cache
def _uncompiled() -> Callable[..., None]:
    # Not of the bound method: a hook that refers to itself would keep the weights until garbage is collected.
    return torch.compiler.disable(lambda hook, *args: hook.run(*args))


class _GroupHook(StreamingHook):
    def __init__(self, group: WeightGroup, listeners: tuple[GroupListener, ...]) -> None:
        super().__init__()
        self._group = group
        self._listeners = listeners


class _BeginHook(_GroupHook):
    def run(self, *args: object) -> None:
        for listener in self._listeners:
            listener.forward_begins(self._group)


class _EndHook(_GroupHook):
    def run(self, *args: object) -> None:
        for listener in self._listeners:
            listener.forward_ended(self._group)
        if torch.is_grad_enabled():
            outputs = [leaf for leaf in leaves(args[-1]).values() if isinstance(leaf, torch.Tensor)]
            outputs = [output for output in outputs if output.requires_grad]
            if outputs:
                # Any of them: the first gradient says that backward has come to the group.
                register_multi_grad_hook(outputs, self._backward, mode="any")

    def _backward(self, gradient: torch.Tensor) -> None:
        for listener in self._listeners:
            listener.backward_begins(self._group)


def stream_weights(
    model: nn.Module,
    groups: Sequence[WeightGroup],
    device: torch.device,
    budget: int | None = None,
    ahead: int = 2,
    listeners: Sequence[GroupListener] = (),
    ready: Callable[[WeightGroup], None] | None = None,
) -> Streamer:
    """Load the weights of ``groups`` before they are used on ``device``, and let them go when others need the room.

    On a CPU these are weights that are memory-mapped from files, and other weights stay where they are.

    Args:
        budget: Most bytes of weights that are loaded at once. None: room for the group in use and ``ahead`` + 1 others
            as large as the largest.
        ahead: So many groups are loaded before they are used.
        listeners: Told of each group's use before it is loaded.
        ready: Called in the background before a group is loaded: returns when no step is still to change it.

    Raises:
        OffloadError: The budget is less than what is used at once.
        UsageError: The model is streamed already.
    """
    torch_modules.probe()
    torch_tensors.probe()
    torch_autograd.probe()
    if streamer_of(model) is not None:
        raise UsageError(
            f"The weights of this {type(model).__name__} are streamed already. Call stop_streaming(model) first."
        )
    if ahead < 0 or (budget is not None and budget < 0):
        raise OffloadError(f"ahead={ahead} and budget={budget} must not be negative. Leave them out.")
    if device.type == "cpu":
        streamer = _streamer(groups, MappedMover(groups), budget, ahead, ready, in_place=True)
        all_listeners, flush = [*listeners, streamer], None
    else:
        streamer, all_listeners, flush = _to_device(groups, device, budget, ahead, listeners, ready)
    hooks = listen(model, groups, all_listeners)
    # Before all other hooks, since it was registered last.
    root = _PassBegins(streamer, flush)
    hooks.add(model.register_forward_pre_hook(root, prepend=True, with_kwargs=True))
    model.__dict__.update(_streamer=streamer, _streamer_hooks=hooks)
    return streamer


def streamer_of(model: nn.Module) -> Streamer | None:
    """Return the streamer of a model whose weights are streamed."""
    return model.__dict__.get("_streamer")


def stop_streaming(model: nn.Module) -> None:
    """Make ``model`` a plain model again, with all weights where they are at rest. Others are left as they are."""
    streamer = streamer_of(model)
    if streamer is None:
        return
    if isinstance(streamer.mover, MappedMover):
        streamer.mover.stop()
    model.__dict__.pop("_streamer_hooks").remove()
    del model.__dict__["_streamer"]
    streamer.close()


def _streamer(
    groups: Sequence[WeightGroup],
    mover: Mover,
    budget: int | None,
    ahead: int,
    ready: Callable[[WeightGroup], None] | None,
    in_place: bool,
) -> Streamer:
    if budget is None:
        largest = max(map(mover.nbytes, groups), default=0)
        budget = least_budget(groups, mover.nbytes) + (ahead + 1) * largest
    return Streamer(groups, mover, budget, ahead, ready, in_place)


def _to_device(
    groups: Sequence[WeightGroup],
    device: torch.device,
    budget: int | None,
    ahead: int,
    listeners: Sequence[GroupListener],
    ready: Callable[[WeightGroup], None] | None,
) -> tuple[Streamer, list[GroupListener], Callable[[], None]]:
    # Models on a CPU do without it.
    from lockstep.offload.weights.device.mover import DeviceMover

    mover = DeviceMover(groups, device, ready=ready)
    streamer = _streamer(groups, mover, budget, ahead, ready, in_place=False)
    mover.slots.budget = streamer.budget
    # The streamer has the mover.
    reference = weakref.ref(streamer)

    def request(group: WeightGroup) -> None:
        found = reference()
        if found is not None:
            found.use(group, in_backward=True)

    def flush() -> None:
        # Otherwise this forward is one that backward computes once more.
        if not torch_autograd.is_in_backward():
            mover.flush()

    mover.request = request
    return streamer, [*listeners, mover, streamer], flush


class _PassBegins(StreamingHook):
    """A hook before each forward of the whole model, which forgets what an interrupt left behind."""

    def __init__(self, streamer: Streamer, flush: Callable[[], None] | None) -> None:
        super().__init__()
        self._streamer = streamer
        self._flush = flush

    def run(self, *args: object) -> None:
        if self._flush is not None:
            self._flush()
        self._streamer.pass_begins()
