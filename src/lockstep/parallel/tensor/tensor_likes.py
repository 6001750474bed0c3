"""What stands for a tensor in the forwards of split modules.

- ``RankFeatures``: features that a rank alone has. They are marked where a column layer makes them, and what is
  computed with them is marked too. An operand without the mark is whole, and the same on all ranks. Where it meets
  marked ones, each rank uses it for its features alone, so that its gradient is complete only as the sum over the
  ranks: it is taken there. What it was computed from, and where else it is used, does not matter then.
- ``ReportedWidth``: the input of an attention module that counts this rank's heads.
- ``WeightElsewhere``: a split weight in another module's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.tree import Args, Kwargs
from lockstep.errors import UsageError
from lockstep.parallel.tensor import communication
from lockstep.parallel.tensor.communication import part_of
from lockstep.torch_internals import tensors as torch_tensors
from lockstep.torch_internals.dispatch import TorchFunction

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from lockstep.parallel.tensor.modules import TensorParallelGroup


class ReportedWidth(Tensor):
    """A tensor that reports a smaller last dimension, and is used whole.

    Attention often finds the width of its heads as ``x.shape[-1] // self.heads``. With this rank's share of the
    heads, the width must be this rank's share too. All but ``shape`` and ``size`` sees the tensor as it is.
    """

    whole: Tensor
    width: int

    @classmethod
    def of(cls, whole: Tensor, width: int) -> ReportedWidth:
        reported = whole.as_subclass(cls)
        reported.whole, reported.width = whole, width
        return reported

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func == Tensor.shape.__get__ or func == Tensor.size:  # type: ignore[attr-defined]
            tensor = args[0]
            shape = torch.Size((*tensor.whole.shape[:-1], tensor.width))
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return shape if dim is None else shape[dim]
        return func(
            *map(_without_marks, args), **{name: _without_marks(value) for name, value in kwargs.items()}
        )


def _without_marks(value: object) -> object:
    if isinstance(value, ReportedWidth):
        return value.whole
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_marks, value)) if type(value) in (list, tuple) else value
    return value


class RankFeatures(Tensor):
    """What a rank computed of its features. ``summing`` gives an operand whose gradient is summed.

    Without ``summing`` it is an operand whose gradient is summed already.
    """

    summing: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(cls, plain: Tensor, summing: Callable[[Tensor], Tensor] | None) -> RankFeatures:
        marked = plain.as_subclass(cls)
        marked.summing = summing
        return marked

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: tuple[object, ...] = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            raise UsageError(
                "The loss was computed from a part of a tensor: a module that is split over ranks (tp) keeps "
                "activations in an attribute, or a hook takes them out. Compute such a term from what the module "
                "returns, or keep the module whole with tp_plan={'NAME': 'replicate'}."
            )
        summing = _first_summing(args, kwargs)
        if summing is None:
            # Also what comes of functions of autograd, which lose the mark.
            with torch_tensors.functions_of_subclasses_disabled():
                return func(*args, **kwargs)
        args = tuple(_operand(value, summing) for value in args)
        kwargs = {name: _operand(value, summing) for name, value in kwargs.items()}
        return _marked(super().__torch_function__(func, types, args, kwargs), summing)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return unmarked(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unmarked(self).__reduce_ex__(protocol)


def unmarked(value: Any) -> Any:
    """Return the plain tensor."""
    if not isinstance(value, RankFeatures):
        return value
    with torch_tensors.functions_of_subclasses_disabled():
        return value.view_as(value)


def _first_summing(args: Args, kwargs: Kwargs) -> Callable[[Tensor], Tensor] | None:
    waiting = [*args, *kwargs.values()]
    for value in waiting:
        if isinstance(value, RankFeatures) and value.summing is not None:
            return value.summing
        if isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
    return None


def _operand(value: Any, summing: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, ReportedWidth):
        value = value.whole
    if isinstance(value, Tensor) and not isinstance(value, RankFeatures):
        return summing(value) if value.requires_grad and torch.is_grad_enabled() else value
    if type(value) in (list, tuple):
        return type(value)(_operand(inner, summing) for inner in value)
    return value


def _marked(value: object, summing: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, RankFeatures):
        value.summing = summing
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _marked(inner, summing)
    return value


def leave_logits(local: Tensor, group: TensorParallelGroup, size: int, stays_split: bool) -> object:
    """Return features [..., size / N] as one [..., size]: gathered, or a DTensor where the loss works on parts."""
    if not (stays_split and group.loss and torch.is_grad_enabled()):
        return communication.gather(local, group.mesh, -1, size)
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*local.shape[:-1], size))
    # Those of a contiguous whole, which no rank has in memory.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, group.mesh, [Shard(local.dim() - 1)], run_check=False, shape=shape, stride=stride
    )


class WeightElsewhere:
    """A split weight, read in the forward of a module that it does not belong to.

    ``F.linear(x, weight)`` and ``x @ weight.T`` compute a part on each rank, as in an output layer that is tied to an
    embedding; everything else gets the whole weight, which is gathered for it.
    """

    def __init__(
        self, group: TensorParallelGroup, parameter: DTensor, owner: nn.Module, is_transposed: bool = False
    ) -> None:
        self._group, self._parameter, self._owner = group, parameter, owner
        self._is_transposed = is_transposed

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self._parameter.shape
        return torch.Size(reversed(shape)) if self._is_transposed else shape

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        return self._parameter.dtype

    @property
    def device(self) -> torch.device:
        return self._parameter.device

    def t(self) -> WeightElsewhere:
        return WeightElsewhere(self._group, self._parameter, self._owner, not self._is_transposed)

    T = mT = property(t)

    def whole(self) -> Tensor:
        whole: Tensor = self._parameter.full_tensor()
        return whole.t() if self._is_transposed else whole

    def __getattr__(self, name: str) -> object:
        if (
            # Methods that change a tensor in place end in one underscore.
            name.endswith("_")
            and not name.endswith("__")
            and name != "requires_grad_"
            and hasattr(Tensor, name)
        ):
            raise UsageError(
                f"A forward changes a weight of {type(self._owner).__name__} in place ({name}), but each rank "
                "holds only a part of this weight (tensor parallel). Change it in the training loop, or leave "
                "that layer out with a tp_plan of your own."
            )
        return getattr(self.whole(), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.whole())

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is F.linear:
            found = cls._logits(*args, **kwargs)
        elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2:
            right = args[1]
            found = cls._logits(args[0], right.t()) if isinstance(right, cls) else None
        else:
            found = None
        if found is not None:
            return found

        def whole(value: object) -> object:
            return value.whole() if isinstance(value, cls) else value

        return func(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})

    @classmethod
    def _logits(cls, input: Tensor, weight: object, bias: Tensor | None = None) -> object:
        """``input`` [..., width] times this rank's rows of the weight; None where that is not split by rows."""
        if not isinstance(weight, cls) or isinstance(input, cls) or weight._is_transposed:
            return None
        group, parameter = weight._group, weight._parameter
        placement = parameter.placements[-1]
        if type(placement).__name__ != "Shard" or not placement.is_shard(0):
            return None
        # [..., width] times [rows / N, width]^T; each rank has an addend of the input's gradient, which ``copy`` sums.
        rows = parameter.shape[0]
        if isinstance(bias, Tensor):
            bias = communication.split(bias, group.mesh, 0)
        local = F.linear(communication.copy(input, group.mesh), parameter.to_local(), bias)
        assert local.shape[-1] == part_of(rows, group.mesh)[1]
        return leave_logits(local, group, rows, weight._owner.training)


def _operator(name: str) -> object:
    """Of the whole weight: Python looks operators up in the class."""

    def apply(self: WeightElsewhere, *args: object) -> object:
        values = (arg.whole() if isinstance(arg, WeightElsewhere) else arg for arg in args)
        return getattr(self.whole(), name)(*values)

    return apply


for _name in (
    *("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul"),
    *("neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "float", "bool", "int"),
):
    setattr(WeightElsewhere, f"__{_name}__", _operator(f"__{_name}__"))
WeightElsewhere.__hash__ = object.__hash__  # type: ignore[method-assign]
