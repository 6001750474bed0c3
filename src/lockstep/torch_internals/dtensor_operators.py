"""Where a script meets DTensors: numbers that are read, random ones that are drawn, and gradients of plain tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
IN_PLACE = (
    *(aten.normal_.default, aten.uniform_.default, aten.exponential_.default, aten.cauchy_.default),
    *(aten.log_normal_.default, aten.geometric_.default),
    *(aten.random_.default, getattr(aten.random_, "from"), aten.random_.to),
    *(aten.bernoulli_.float, aten.bernoulli_.Tensor),
)
"""The operators that fill their first argument with random numbers."""
LIKE = (
    *(
        aten.rand_like.default,
        aten.randn_like.default,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
    ),
    *(aten.bernoulli.default, aten.bernoulli.p),
)
"""Those that return as many as their first argument has elements."""

Whole = Callable[[Any], torch.Tensor]
Sharded = Callable[[torch.Tensor, Any], Any]


@functools.cache
def behave_like_plain(shard_like: Sharded) -> None:
    """Let DTensors do the following, in this process from now on.

    A DTensor of one number gives the whole one on every rank: torch gives each rank its own part, of
    ``parameter.grad.norm()`` the norm of its own shard. Collective wherever a number is read from one that is not
    replicated.

    Random numbers are drawn for the whole tensor, as on one process, and are the first rank's: torch lets each rank
    draw for its part. Collective.

    Args:
        shard_like: Gives of a whole tensor, which every rank has, this rank's part as a DTensor laid out as another.

    Relies on: ``DTensor._op_dispatcher._custom_op_handlers``, asked first by torch, with (op, args, kwargs).
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[aten._local_scalar_dense.default] = _whole_number
    for operator in IN_PLACE:
        handlers[operator] = functools.partial(_fill, shard_like)
    for operator in LIKE:
        handlers[operator] = functools.partial(_draw_like, shard_like)


def _whole(tensor: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _whole_number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _whole(args[0]).item()


def _fill(shard_like: Sharded, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, *others = args
    whole = torch.empty(target.shape, dtype=target.dtype, device=target._local_tensor.device)
    op(whole, *map(_whole, others), **kwargs)
    target._local_tensor.copy_(shard_like(_of_first(whole, target), target)._local_tensor)
    return target


def _draw_like(shard_like: Sharded, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like, *others = args
    whole = op(_whole(like), *others, **kwargs)
    return shard_like(_of_first(whole, like), like)


def _of_first(whole: torch.Tensor, like: Any) -> torch.Tensor:
    mesh = like.device_mesh
    for dim in range(mesh.ndim):
        torch.distributed.broadcast(whole, group=mesh.get_group(dim), group_src=0)
    return whole


def keep_plain_gradients(loss: torch.Tensor) -> None:
    """Let the plain tensors from which this DTensor was computed, besides others, get plain gradients.

    torch gives them DTensors as it goes back from a sum such as that of a plain loss and a norm of sharded parameters.
    Plain is what was computed from no DTensor, or behind ``full_tensor`` and ``to_local``.
    """
    of_dtensors = _nodes_of_dtensors(loss.grad_fn)
    borders = {
        following
        for node in (*of_dtensors, loss.grad_fn)
        for following, _ in node.next_functions
        if following is not None and following not in of_dtensors
    }
    for node in borders:
        node.register_prehook(_plain)


def _nodes_of_dtensors(root: Any) -> set[Any]:
    """Those nodes of autograd from which a parameter that is a DTensor is reached by way of DTensors.

    Relies on: what ends at a leaf has it as ``variable``; ``_ToTorchTensor`` makes plain tensors of DTensors.
    """
    from torch.distributed.tensor import DTensor

    found: set[Any] = set()
    seen: set[Any] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        node, is_left = waiting.pop()
        following = [one for one, _ in node.next_functions if one is not None]
        if is_left:
            if not found.isdisjoint(following):
                found.add(node)
        elif node not in seen:
            seen.add(node)
            if isinstance(getattr(node, "variable", None), DTensor):
                found.add(node)
            elif not node.name().startswith("_ToTorchTensor"):
                waiting.append((node, True))
                waiting.extend((one, False) for one in following)
    return found


def _plain(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(_whole, gradients))
