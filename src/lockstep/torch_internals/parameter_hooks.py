"""Hooks of parameters: the user's, and Lockstep's own before and after them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

TENSOR, POST_ACCUMULATE = "register_hook", "register_post_accumulate_grad_hook"
"""The kinds of hooks, by the methods that set them."""
_HOOKS = {TENSOR: "_backward_hooks", POST_ACCUMULATE: "_post_accumulate_grad_hooks"}
"""Relies on: these attributes are None or dictionaries with the hooks as values."""


def kinds_of_hooks(parameter: object) -> list[str]:
    """Of which kinds this tensor has hooks, other than Lockstep's own."""
    return [kind for kind in _HOOKS if has_hook(parameter, kind)]


def has_hook(parameter: object, kind: str) -> bool:
    """Whether the user has set one of this kind."""
    hooks = getattr(parameter, _HOOKS[kind])
    return bool(hooks) and not all(map(_is_ours, hooks.values()))


def kind_of_hook(parameter: object) -> str | None:
    """The method that set a hook on this tensor; None: there is none but Lockstep's own."""
    return next((kind for kind in _HOOKS if has_hook(parameter, kind)), None)


def hooks_of_parameter(parameter: Any, kind: str) -> list[Any]:
    """All of this kind, in the order in which they are called."""
    return list((getattr(parameter, _HOOKS[kind]) or {}).values())


def call_around_others(
    parameter: object, kind: str, first: Callable[..., object], last: object, replaced: tuple[type, ...]
) -> None:
    """Set a hook before all others and, unless it is None, one after them; those of the ``replaced`` types go.

    Relies on: hooks are called in the order in which the dictionary, not ``move_to_end`` of it, has them, each with
    what the one before has returned.
    """
    hooks = getattr(parameter, _HOOKS[kind])
    others = {number: hook for number, hook in hooks.items() if not isinstance(hook, replaced)}
    hooks.clear()
    for hook in (first, last):
        if hook is not None:
            getattr(parameter, kind)(hook)
    ours = list(hooks.items())
    hooks.clear()
    hooks.update([ours[0], *others.items(), *ours[1:]])


def _is_ours(hook: object) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).split(".")[0] == "lockstep"
