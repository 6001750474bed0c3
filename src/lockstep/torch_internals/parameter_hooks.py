"""Hooks that a user has set on a parameter."""

from __future__ import annotations

from functools import partial
from typing import Any


def kind_of_hook(parameter: Any) -> str | None:
    """The method that set a hook on this tensor; None: there is none but Lockstep's own.

    Relies on: ``_backward_hooks`` and ``_post_accumulate_grad_hooks`` are None or mappings with the hooks as values.
    """
    if any(not _is_ours(hook) for hook in (parameter._backward_hooks or {}).values()):
        return "register_hook"
    if any(not _is_ours(hook) for hook in (parameter._post_accumulate_grad_hooks or {}).values()):
        return "register_post_accumulate_grad_hook"
    return None


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).split(".")[0] == "lockstep"
