"""Hooks that a user has set on a parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def kind_of_hook(parameter: Any) -> str | None:
    """The method that set a hook on this tensor; None: there is none but Lockstep's own.

    Relies on: ``_backward_hooks`` and ``_post_accumulate_grad_hooks`` are None or mappings with the hooks as values.
    """
    for kind, hooks in (
        ("register_post_accumulate_grad_hook", parameter._post_accumulate_grad_hooks),
        ("register_hook", parameter._backward_hooks),
    ):
        if hooks and not all(map(_is_ours, hooks.values())):
            return kind
    return None


def call_before_others(parameter: Any, hook: Callable[[Any], Any]) -> None:
    """Relies on: ``_backward_hooks`` are called as they were inserted, each with what the one before has returned."""
    parameter.register_hook(hook)
    hooks = parameter._backward_hooks
    *others, (number, ours) = hooks.items()
    hooks.clear()  # the order of the dict counts, which move_to_end does not change
    hooks.update({number: ours, **dict(others)})


def hooks_of(parameter: Any) -> list[Any]:
    """What ``register_hook`` has set, in the order in which it is called."""
    return list((parameter._backward_hooks or {}).values())


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).split(".")[0] == "lockstep"
