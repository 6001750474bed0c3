"""Which pass of autograd's engine is running, and what is called at its end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def current_pass() -> int:
    """A number of the backward pass that runs in this thread, another for each; -1 outside of one.

    Relies on: ``torch._C._current_graph_task_id``.
    """
    number: int = torch._C._current_graph_task_id()
    return number


def at_end_of_pass(call: Callable[[], None]) -> None:
    """Call it when the pass that runs now is over, after what was asked for before.

    Relies on: ``Variable._execution_engine.queue_callback``, which also takes calls from such calls.
    """
    Variable._execution_engine.queue_callback(call)
