"""A split weight in the forward of another module than its own, and the logits that it computes there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.tree import Args, Kwargs
from lockstep.errors import UsageError
from lockstep.parallel.tensor import communication
from lockstep.parallel.tensor.communication import part_of
from lockstep.torch_internals.dispatch import TorchFunction

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from lockstep.parallel.tensor.modules import TensorParallelGroup


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
        """Multiply ``input`` [..., width] by this rank's rows of the weight; None where that is not split by rows."""
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
    """Compute an operator of the whole weight: Python looks operators up in the class."""

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
