"""Where a script meets DTensors: numbers that are read, random ones that are drawn, and gradients of plain tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import torch
from torch._ops import OpOverload
from torch.autograd.graph import Node

from lockstep.errors import UsageError
from lockstep.torch_internals.dtensor_views import (
    VIEWS,
    keep_values,
    marking,
    refuse_change_of_copy,
    refuse_tie,
    shares_memory,
    sharing,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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

CHANGING = (
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.copy_.default),
    *(aten.lerp_.Scalar, aten.lerp_.Tensor, aten.addcmul_.default, aten.addcdiv_.default),
    *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.clamp_.default),
    *(aten.clamp_min_.default, aten.clamp_max_.default, aten.neg_.default, aten.abs_.default),
    *(aten.sign_.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor),
)
"""Operators that change a tensor: maybe a plain one by a DTensor (scalar parameters are never sharded), or a copy of a
part of a DTensor, where plain torch would have a view."""

BESIDE_IN_PLACE = (
    *(aten._foreach_add_.List, aten._foreach_sub_.List, aten._foreach_mul_.List),
    *(aten._foreach_lerp_.Scalar, aten._foreach_lerp_.List),
)
BESIDE = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.lerp.Scalar, aten.lerp.Tensor),
    *(aten._foreach_add.List, aten._foreach_sub.List, aten._foreach_mul.List),
    *(aten._foreach_lerp.Scalar, aten._foreach_lerp.List, aten._foreach_copy_.default),
    *BESIDE_IN_PLACE,
)
"""What averages of weights are computed with: maybe whole ones, made before the model was sharded, beside shards."""

DIFFERENCES = (aten.add.Tensor, aten.sub.Tensor)
"""Those whose gradients need no other argument."""

MEAN, SUM = 1, 2
"""Reductions of losses, as operators have them."""
LOSSES = (
    *(aten.mse_loss.default, aten.mse_loss_backward.default),
    *(aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default),
    *(aten.huber_loss.default, aten.huber_loss_backward.default),
    *(aten.soft_margin_loss.default, aten.soft_margin_loss_backward.default),
    *(aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default),
    aten.binary_cross_entropy_with_logits.default,
)
"""Losses of which torch averages the ranks' means, and multiplies the gradient by the number of ranks."""

OF_LAYERS = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.embedding.default, aten.native_layer_norm.default, aten.convolution.default),
)
"""Products of layers' weights with what the layers get."""

Sharded: TypeAlias = "Callable[[torch.Tensor, DTensor], DTensor]"
OperatorArguments: TypeAlias = tuple[Any, ...]
"""Of an operator: tensors, numbers, and lists of them."""


@functools.cache
def behave_like_plain(shard_like: Sharded) -> None:
    """Let DTensors do the following, in this process from now on.

    A DTensor of one number gives the whole one on every rank: torch gives each rank its own part, of
    ``parameter.grad.norm()`` the norm of its own shard. Collective wherever a number is read from one that is not
    replicated.

    Random numbers are drawn for the whole tensor, as on one process, and are the first rank's: torch lets each rank
    draw for its part. Collective.

    ``tensor[...] = value`` and ``tensor.data = value`` change it, the first by gathering it: in torch's DTensors they
    change a copy, or nothing. What ``parameter.data`` gave before keeps its values, as in plain torch. A plain tensor
    may be changed by a DTensor in place, and a DTensor be copied from a whole tensor, of which each rank takes its
    part. To change a copy of a part is refused, as by ``tensor[0].zero_()``.

    A DTensor of which this rank has a part only is not pickled, and so not written by ``torch.save``.

    A DTensor that is changed by one on another mesh gets it in its own layout. Collective. A plain tensor that is
    multiplied by a sharded weight is refused in our words.

    A loss such as ``mse_loss`` is the mean over the whole tensor, and so is its gradient.

    Where no gradient is asked for, a whole tensor beside a DTensor of its shape, as in averages of weights, gives a
    whole tensor: the DTensor is gathered. Collective.

    Args:
        shard_like: Gives of a whole tensor, which every rank has, this rank's part as a DTensor laid out as another.

    Relies on: ``DTensor._op_dispatcher._custom_op_handlers``, asked first by torch, with (op, args, kwargs), whatever
    argument is a DTensor, and every time, so that a handler that steps aside lets torch go on.
    """
    from torch.distributed.tensor import DTensor

    operators = _PlainOperators(shard_like, DTensor._op_dispatcher._custom_op_handlers)
    operators.install()
    kind: Any = DTensor
    data = kind.data
    kind.data = property(sharing(data.__get__), functools.partial(_set_data, shard_like, data.__set__))
    kind.detach = sharing(kind.detach)
    kind.__setitem__ = _setting_items(shard_like, kind.__setitem__)
    kind.__getitem__ = marking(kind.__getitem__)
    kind.__reduce_ex__ = functools.partialmethod(_reduce, kind.__reduce_ex__)
    for name in VIEWS:
        setattr(kind, name, marking(getattr(kind, name)))


def _is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _full_tensor(tensor: object) -> Any:
    if not _is_dtensor(tensor):
        return tensor
    # torch 2.11 would detach the result in place, for which it has no strategy
    return cast("DTensor", tensor.detach()).full_tensor()


class _PlainOperators:
    """What is done for the operators, each a handler with (operator, args, kwargs). See ``behave_like_plain``."""

    def __init__(self, shard_like: Sharded, handlers: dict[OpOverload, Callable[..., object]]) -> None:
        self._shard_like = shard_like
        self._handlers = handlers

    def install(self) -> None:
        """Have DTensor call them."""
        self._handlers[aten._local_scalar_dense.default] = self._whole_number
        for operators, handler in (
            (IN_PLACE, self._fill),
            (LIKE, self._draw_like),
            (CHANGING, self._change),
            (BESIDE, self._beside),
            (OF_LAYERS, self._multiply),
            (LOSSES, self._mean_loss),
        ):
            self._handlers.update(dict.fromkeys(operators, handler))

    def _whole_number(self, op: OpOverload, args: OperatorArguments, kwargs: dict[str, object]) -> object:
        return _full_tensor(args[0]).item()

    def _fill(self, op: OpOverload, args: OperatorArguments, kwargs: dict[str, object]) -> object:
        target, *others = args
        # Drawn whole on every rank and sent from the first: the generators of ranks may stand at different places.
        whole = torch.empty(target.shape, dtype=target.dtype, device=target._local_tensor.device)
        op(whole, *map(_full_tensor, others), **kwargs)
        target._local_tensor.copy_(self._shard_like(_of_first(whole, target), target)._local_tensor)
        return target

    def _draw_like(self, op: OpOverload, args: OperatorArguments, kwargs: dict[str, object]) -> object:
        like, *others = args
        whole = op(_full_tensor(like), *others, **kwargs)
        return self._shard_like(_of_first(whole, like), like)

    def _beside(self, op: OpOverload, args: OperatorArguments, kwargs: dict[str, object]) -> object:
        # torch has no strategy for it.
        if op is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                target.copy_(source)
            return None
        given = [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        sharded = [one for one in tensors if _is_dtensor(one)]
        whole = [one for one in tensors if not _is_dtensor(one) and one.dim() > 0]
        # Averages are meant, and penalties towards copies. What else needs a gradient, or mixes shapes, is left to
        # torch, which refuses it.
        if not whole or not {one.shape for one in whole} <= {one.shape for one in sharded}:
            return self._as_torch(op, args, kwargs)
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
            if op not in DIFFERENCES:
                return self._as_torch(op, args, kwargs)
            if any(one.requires_grad for one in sharded):
                return self._as_torch(op, tuple(self._laid_out_as(sharded[0], one) for one in args), kwargs)
        if op in BESIDE_IN_PLACE and any(map(_is_dtensor, args[0])):
            return self._as_torch(op, args, kwargs)
        whole_args = [
            [*map(_full_tensor, arg)] if isinstance(arg, (list, tuple)) else _full_tensor(arg) for arg in args
        ]
        return op(*whole_args, **kwargs)

    def _change(self, op: OpOverload, args: OperatorArguments, kwargs: dict[str, object]) -> object:
        target, *others = args
        if not _is_dtensor(target):
            return op(
                *map(_full_tensor, args), **{name: _full_tensor(value) for name, value in kwargs.items()}
            )
        refuse_change_of_copy(target)
        if op is aten.copy_.default and not _is_dtensor(others[0]) and others[0].shape == target.shape:
            target._local_tensor.copy_(self._shard_like(others[0], target)._local_tensor)
            return target
        # As an average that another library has sharded itself, or a mask.
        others = [self._laid_out_as(target, other) for other in others]
        return self._as_torch(op, (target, *others), kwargs)

    def _laid_out_as(self, target: DTensor, other: object) -> object:
        """Return ``other`` laid out as ``target``, if it is a plain tensor, or a DTensor of its shape on another
        mesh."""
        if _is_dtensor(other) and (other.device_mesh == target.device_mesh or other.shape != target.shape):
            return other
        if not isinstance(other, torch.Tensor) or (other.numel() == 1 and not _is_dtensor(other)):
            return other
        return self._shard_like(_full_tensor(other).expand(target.shape), target)

    def _multiply(self, op: OpOverload, args: OperatorArguments, kwargs: dict[str, object]) -> object:
        given = [one for one in args if isinstance(one, torch.Tensor) and one.numel() > 1]
        whole = next((one for one in given if not _is_dtensor(one)), None)
        if whole is None:
            return self._as_torch(op, args, kwargs)
        # The weight has more dimensions than its bias, which may be a DTensor as well.
        shard = max((one for one in args if _is_dtensor(one)), key=torch.Tensor.dim)
        # As the cause, so that who knows which method was called says more.
        torchs = RuntimeError(f"{op} got mixed torch.Tensor and DTensor")
        raise UsageError(
            f"A weight of shape {tuple(shard.shape)}, of which each rank has a part, was combined with a plain "
            f"tensor of shape {tuple(whole.shape)}. A module inside a block was called without its block, or its "
            "weight was used there, so the weight was not gathered. Call the block or the model. If you need no "
            "gradient, gather the weight: with lockstep.utils.GatheredParameters(module.parameters())."
        ) from torchs

    def _mean_loss(self, op: OpOverload, args: OperatorArguments, kwargs: dict[str, object]) -> object:
        arguments = op._schema.arguments
        # torch leaves out arguments at the end that are as by default.
        given = [*args, *(kwargs.get(one.name, one.default_value) for one in arguments[len(args) :])]
        place = [one.name for one in arguments].index("reduction")
        if given[place] != MEAN:
            return self._as_torch(op, args, kwargs)
        given[place] = SUM
        if arguments[0].name == "grad_output":
            return self._as_torch(op, (given[0] / given[1].numel(), *given[1:]), {})
        total: Any = self._as_torch(op, tuple(given), {})
        return total / given[0].numel()

    def _as_torch(self, op: OpOverload, args: OperatorArguments, kwargs: dict[str, object]) -> object:
        """Return what torch would have done."""
        # Without the handler torch finds its own way; with it, this would call itself.
        handler = self._handlers.pop(op)
        try:
            return op(*args, **kwargs)
        finally:
            self._handlers[op] = handler


def _set_data(
    shard_like: Sharded, in_torch: Callable[[object, object], None], tensor: DTensor, value: torch.Tensor
) -> None:
    part = tensor._local_tensor
    if value.shape != tensor.shape or value.dtype != tensor.dtype or value.device != tensor.device:
        in_torch(tensor, value)
        return
    shard = value if _is_dtensor(value) and value.placements == tensor.placements else None
    if _is_dtensor(value):
        if shares_memory(tensor, value):
            return
        refuse_tie(tensor, value)
    keep_values(tensor)
    # Into the part itself: torch's own setter would leave that as it was.
    with torch.no_grad():
        part.copy_((shard_like(_full_tensor(value), tensor) if shard is None else shard)._local_tensor)


def _setting_items(shard_like: Sharded, in_torch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(in_torch)
    def set_items(tensor: DTensor, index: object, value: object) -> None:
        # Where autograd is to follow, torch does it, or refuses.
        if torch.is_grad_enabled() and (tensor.requires_grad or getattr(value, "requires_grad", False)):
            in_torch(tensor, index, value)
            return
        refuse_change_of_copy(tensor)
        # Changed as a whole, and cut again: an index says nothing about whose elements it means.
        whole = _full_tensor(tensor).clone()
        whole[tuple(map(_full_tensor, index)) if isinstance(index, tuple) else _full_tensor(index)] = (
            _full_tensor(value)
        )
        tensor._local_tensor.detach().copy_(shard_like(whole, tensor)._local_tensor)

    return set_items


def _reduce(tensor: DTensor, in_torch: Callable[[DTensor, object], object], protocol: object) -> object:
    refuse_to_save_part(tensor)
    return in_torch(tensor, protocol)


def refuse_to_save_part(tensor: DTensor) -> None:
    """Raise UsageError if this rank has only a part of the tensor: a file of it would lose the other parts."""
    if all(placement.is_replicate() for placement in tensor.placements):
        return
    raise UsageError(
        f"A tensor of shape {tuple(tensor.shape)} was to be saved or pickled, but this rank has only a part of it, of "
        f"shape {tuple(tensor._local_tensor.shape)}. To write whole weights, call accelerator.save_model(model, "
        "folder) on every rank. To have them, call accelerator.get_state_dict(model) on every rank. To save a run "
        "that goes on later, call accelerator.save_state(folder)."
    )


def _of_first(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    mesh = like.device_mesh
    for dim in range(mesh.ndim):
        torch.distributed.broadcast(whole, group=mesh.get_group(dim), group_src=0)
    return whole


def keep_plain_gradients(loss: torch.Tensor) -> None:
    """Let the plain tensors from which this DTensor was computed, besides others, get plain gradients.

    torch gives them DTensors as it goes back from a sum such as that of a plain loss and a norm of sharded parameters.
    Plain is what was computed from no DTensor, or behind ``full_tensor`` and ``to_local``.
    """
    root = loss.grad_fn
    assert root is not None
    of_dtensors = _nodes_of_dtensors(root)
    # Behind a border no parameter is a DTensor, so that the gradient is to be a plain one from there on.
    borders = {
        following
        for node in (*of_dtensors, root)
        for following, _ in node.next_functions
        if following is not None and following not in of_dtensors
    }
    for node in borders:
        node.register_prehook(_plain)


def _nodes_of_dtensors(root: Node) -> set[Node]:
    """Return those nodes of autograd from which a parameter that is a DTensor is reached by way of DTensors.

    Relies on: what ends at a leaf has it as ``variable``; ``_ToTorchTensor`` makes plain tensors of DTensors.
    """
    found: set[Node] = set()
    seen: set[Node] = set()
    # Each node comes twice: it is decided after all that follows it.
    waiting: list[tuple[Node, bool]] = [(root, False)]
    while waiting:
        node, is_left = waiting.pop()
        following = [one for one, _ in node.next_functions if one is not None]
        if is_left:
            if not found.isdisjoint(following):
                found.add(node)
        elif node not in seen:
            seen.add(node)
            if _is_dtensor(getattr(node, "variable", None)):
                found.add(node)
            elif not node.name().startswith("_ToTorchTensor"):
                waiting.append((node, True))
                waiting.extend((one, False) for one in following)
    return found


def _plain(gradients: OperatorArguments) -> tuple[object, ...]:
    return tuple(map(_full_tensor, gradients))
