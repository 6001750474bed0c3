"""``torch.compile``: what it returns, and what it is to leave alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._compile import _disable_dynamo
from torch._guards import TracingContext

from lockstep.torch_internals.versions import expect, probed

Compiled = TypeVar("Compiled")

disable = _disable_dynamo
"""Decorator of a function that is called as it is, also by compiled code. Relies on: it imports nothing before that."""


def leave_out(kind: type) -> type:
    """Keep the compiler from the methods of a class, and from what they call. Imports nothing of it.

    Relies on: ``set_code_exec_strategy``.
    """
    for value in vars(kind).values():
        if hasattr(value, "__code__"):
            set_code_exec_strategy(value.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return kind


@contextmanager
def without_compiling() -> Iterator[None]:
    """Let functions that ``torch.compile`` has compiled run as they were written, inside."""
    if "torch._dynamo" not in sys.modules:
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


FRAMES = frozenset({"_fn"})
"""Relies on: the names of compiled modules' own functions in a stack."""


def original(module: Compiled) -> Compiled:
    """Return the module inside of what ``torch.compile`` returned, else itself. Relies on: ``_orig_mod``."""
    return getattr(module, "_orig_mod", module)


def mark_compiled(module: nn.Module, original: nn.Module) -> None:
    """Let a module whose parts are compiled pass for what ``torch.compile`` returned. Relies on: ``_orig_mod``."""
    module.__dict__["_orig_mod"] = original


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` returned it."""
    return hasattr(module, "_orig_mod")


def compiled_alike(inner: nn.Module, module: nn.Module) -> nn.Module:
    """Wrap ``inner`` in such a compiled module as ``module`` is. Relies on: its class takes a module and
    ``dynamo_ctx``."""
    again: nn.Module = type(module)(inner, module.dynamo_ctx)
    return again


@probed("torch.compile", "wraps modules and functions")
def probe() -> None:
    """Call a function that is left alone. To wrap a module would import the compiler, which takes seconds."""
    called: list[object] = []

    def function(value: int) -> int:
        called.append(value)
        return value + 1

    expect(callable(disable(function)), "a function that is left alone")
    expect(original(nn) is nn and torch.compile is not None, "what was not compiled")


def compiled_frames() -> int:
    """Frames that were compiled in this process so far. Relies on: ``counters["frames"]["ok"]`` counts them."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["ok"])


def is_tracing() -> bool:
    """Return whether the compiler looks at tensors now. Relies on: ``TracingContext.try_get`` gives None otherwise."""
    return TracingContext.try_get() is not None
