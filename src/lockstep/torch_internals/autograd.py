"""autograd's engine: which backward is under way, what happens at its end, and what is saved for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import torch
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.torch_internals.versions import expect, probed

NO_BACKWARD = -1

FunctionContext: TypeAlias = Any
"""What autograd hands to a function's ``forward`` and ``backward``, which keeps on it what backward needs."""


def current_backward() -> int:
    """Return a number of the backward in which this thread is; ``NO_BACKWARD`` in none.

    Relies on: ``_current_graph_task_id``; numbers are not used again.
    """
    return int(torch._C._current_graph_task_id())


def is_in_backward() -> bool:
    """Return whether this thread is inside a backward, as when checkpointing repeats a forward."""
    return current_backward() != NO_BACKWARD


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have it called once when the backward that is under way has come to its end, before ``backward`` returns.

    Relies on: ``Variable._execution_engine.queue_callback``. A backward that raises calls none.
    """
    engine = Variable._execution_engine
    engine.queue_callback(callback)


def is_transformed() -> bool:
    """Return whether ``torch.func`` (``grad``, ``jvp``, ``vmap``, ...) or forward-mode differentiation is at work.

    Relies on: ``_are_functorch_transforms_active``; ``forward_ad._current_level`` is -1 outside of all levels.
    """
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def saved_tensors_hooks_now() -> tuple[Callable[..., object], Callable[..., object]] | None:
    """Return (pack, unpack) of the innermost ``saved_tensors_hooks`` around; None outside of all.

    Relies on: ``_top_saved_tensors_default_hooks(True)``, where True asks for those that tracing would ignore, too.
    """
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def module_of_function(node: object) -> str | None:
    """Return where the ``autograd.Function`` of a node of the graph is defined; None for torch's own operators.

    Relies on: ``_forward_cls`` of the type of such a node.
    """
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return None
    return getattr(getattr(type(node), "_forward_cls", node), "__module__", "")


def saved_by(node: object) -> Iterator[object]:
    """Yield what a node of the graph keeps for its backward. Relies on: attributes that begin with ``_saved_``."""
    for name in dir(node):
        if name.startswith("_saved_"):
            yield getattr(node, name, None)


def copy_of_saved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy without a graph, also of a number that a node keeps as a tensor (``x / 4``).

    Relies on: dispatch modes get such a number as a float, so that an operator on it fails where one is active.
    """
    with _disable_current_modes():
        return tensor.detach().clone()


def leaves_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the leaves of the graph behind a tensor of any shape. Relies on: ``variable`` of the nodes that
    accumulate."""
    return (node.variable for node in _graph_of(tensor) if hasattr(node, "variable"))


def next_sequence_number() -> int:
    """Return the number that this thread gives to the next node of the graph. Relies on: ``_get_sequence_nr``."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number(node: Node) -> int:
    """Return the number that a node was given when it was made. Relies on: ``_sequence_nr``; it grows within a
    thread."""
    return int(node._sequence_nr())


def nodes_of(tensor: torch.Tensor, ends: Collection[str] = ()) -> Iterator[Node]:
    """Return the nodes of the graph behind a tensor of any shape, but for those that accumulate into leaves.

    ``ends``: names of nodes behind which it is not followed.
    """
    return (node for node in _graph_of(tensor, ends) if not hasattr(node, "variable"))


def _graph_of(tensor: torch.Tensor, ends: Collection[str] = ()) -> Iterator[Any]:
    # Not recursive: the graph of a deep model may be deeper than Python's stack.
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node.name() not in ends:
            waiting += [following for following, _ in node.next_functions]


def traceback_of(node: Any) -> list[str]:
    """Return where a node was made, as ``traceback.format_stack`` has it; empty where anomaly detection was off.

    Relies on: the entry ``traceback_`` of a node's ``metadata``.
    """
    return list(node.metadata.get("traceback_", ()))


@probed("autograd", "tells where a backward begins and ends")
def probe() -> None:
    """Run a backward of one number."""
    leaf = torch.ones(1, requires_grad=True)
    seen: list[object] = [is_in_backward()]

    def during(gradient: torch.Tensor) -> None:
        seen.append(is_in_backward())
        at_end_of_backward(lambda: seen.append(("end", leaf.grad is not None)))

    doubled = leaf * 2
    doubled.register_hook(during)
    doubled.sum().backward()
    seen.append(is_in_backward())
    expect(seen == [False, True, ("end", True), False], "where a backward begins and ends")
    mean = torch.ones(3, requires_grad=True).mean()
    expect(3 in saved_by(mean.grad_fn), "what a mean keeps")
