"""Operators on their way through torch's dispatcher: modes that see them, and their schemas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.errors import UsageError
from lockstep.torch_internals.versions import expect, probed


def schema_of(operator: object) -> Any:
    """Return name and arguments of an operator; None if it has no schema. Relies on: ``_schema``."""
    return getattr(operator, "_schema", None)


def operation_name(operator: OpOverload) -> str:
    """Return the name of an operation, such as "add_". Relies on: ``_schema.name`` of an operation is that after its
    namespace."""
    return str(operator._schema.name).removeprefix("aten::")


def argument_names(operator: Any) -> list[str]:
    """Return the names of arguments in the order in which they may be given by position."""
    return [argument.name for argument in operator._schema.arguments]


def changes_arguments(operator: Any) -> bool:
    """Return whether it writes into a tensor that it is given. Relies on: ``_schema.is_mutable``."""
    return bool(operator._schema.is_mutable)


def operators_of(names: Sequence[str]) -> list[object]:
    """Return those operators of these names that ``torch.ops.aten`` has."""
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


def modes_are_active() -> bool:
    """Return whether a dispatch mode sees the operators of this thread. Relies on: ``_len_torch_dispatch_stack``."""
    return bool(torch._C._len_torch_dispatch_stack())


class unseen_by_modes:
    """Context manager: operators within are seen by no dispatch mode, and tensors made within are ordinary ones.

    Relies on: ``_disable_current_modes``.
    """

    def __enter__(self) -> None:
        self._left: ExitStack | None = None
        sees_modes, infers = modes_are_active(), torch.is_inference_mode_enabled()
        if not (sees_modes or infers):
            return
        self._left = ExitStack()
        if sees_modes:
            self._left.enter_context(_disable_current_modes())
        if infers:
            self._left.enter_context(torch.inference_mode(False))

    def __exit__(self, *_: object) -> None:
        if self._left is not None:
            self._left.close()


class WithoutCollectives(TorchDispatchMode):
    """Within it a collective raises instead of waiting for ranks that take no part in it.

    Relies on: collectives are operators of these namespaces.

    Raises:
        UsageError: one is called.
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise UsageError(
                f"its forward or backward calls the collective {operation_name(func).partition('::')[2]}, but "
                "only one rank runs this computation (a function or a global name may hold a part of the split "
                "model)"
            )
        return func(*args, **(kwargs or {}))


PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "convolution"),
    *("_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    *("_flash_attention_forward", "_efficient_attention_forward"),
)
"""Matrix products and attention of ``torch.ops.aten``. Relies on: a name that is missing is of no operator that is
called; what is computed again in its place is the same."""


CONVERSIONS = ("_to_copy",)
"""Relies on: what ``to`` calls to change a type or a device."""
COMBINING_LISTS = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})
"""Relies on: the operators on lists that do more than element by element; all others on lists do only that."""


@probed("dispatcher", "shows operators")
def probe() -> None:
    """Ask for names and arguments of operators."""
    expect(argument_names(torch.ops.aten.mm.default) == ["self", "mat2"], "the arguments of an operator")
    add = torch.ops.aten.add_.Tensor
    expect(operation_name(add) == "add_" and changes_arguments(add), "the name of an operation in place")
    expect(len(operators_of((*CONVERSIONS, *("_foreach_norm", "_foreach_max")))) == 3, "operators on lists")


TorchFunction: TypeAlias = Callable[..., Any]
"""A function of torch, as modes get it: what it takes and returns is its own affair."""
