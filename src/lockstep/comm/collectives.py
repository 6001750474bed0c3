"""Gather, reduce, broadcast and pad nested containers over the ranks of a run.

Before each of them the ranks compare what they are about to call (``exchange``).
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from lockstep.comm.agreement import CollectiveCall, leaf_spec, tensors_only
from lockstep.comm.exchange import GATHER_ALIKE, CallExchange, all_gather_into_tensor
from lockstep.comm.tree import Tree, leaves, map_leaves
from lockstep.errors import UsageError
from lockstep.runtime.clock import waiting_for_ranks
from lockstep.torch_internals.autograd import FunctionContext

Reduction = Literal["mean", "sum", "max", "none"]
# Sums of these are taken in another type: halves are rounded once, the others have no sum in gloo.
SUM_TYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.int64,
    torch.int16: torch.int64,
}

GATHER_OBJECT = CollectiveCall("gather_object")


class CannotPadNestedTensorWarning(UserWarning):
    """``pad_across_processes`` warns with it that it left a nested tensor (``torch.nested``) as it was.

    Examples:
        ```python
        import warnings
        import torch
        from lockstep.utils import CannotPadNestedTensorWarning, pad_across_processes

        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pad_across_processes(nested)
        assert any(one.category is CannotPadNestedTensorWarning for one in caught)
        ```
    """


class Communicator(CallExchange):
    """The collectives of one run, each called by all ranks; only ``gather_for_loss`` is differentiable.

    Tensors may be of any shape, dtype and device; results are on the device of the input. In a
    world of one nothing is communicated and no process group is needed.

    Every method raises on all ranks alike: ``CollectiveMismatchError`` where the ranks called
    different methods or passed different structures, shapes or dtypes; ``TypeError`` where a
    tensor is needed and something else was found.

    Args:
        runtime: Rank and world size are those within ``group``.
        group: The ranks that take part; None: all, in the main group.
    """

    def with_gloo(self) -> Communicator:
        """Make a communicator of all ranks in a new group of gloo: for a thread of its own, or for files."""
        group = dist.new_group(backend="gloo") if self.world_size > 1 else None
        return Communicator(replace(self.runtime, backend="gloo"), group)

    def gather(self, tree: Tree) -> Tree:
        """Replace every tensor by the concatenation along dim 0 of all ranks' tensors, in rank order.

        (n_r, ...) on rank r becomes (sum of n_r, ...); a 0-d tensor counts as one row. The n_r may
        differ, also be 0. In a world of one the tree comes back as it is.
        """
        if self.world_size == 1:
            return tree
        found = leaves(tree)
        call = CollectiveCall(
            "gather", {path: leaf_spec(leaf, at_least_1d=True) for path, leaf in found.items()}
        )
        calls = self._exchange_calls(call, tensors_only("gather", found, "gather_object"), free_dim=0)
        results = {}
        # Dicts of ranks may have been filled in different orders.
        for path in sorted(found):
            rows = [other.leaves[path].shape[0] for other in calls]
            results[path] = self._gather_tensor(found[path], rows)
        return map_leaves(lambda path, _: results[path], tree)

    def gather_for_loss(self, tree: Tree, problem: Exception | None = None) -> Tree:
        """Gather with a backward that gives each rank the sum of all ranks' gradients of its own rows.

        Every rank must use the result in its loss, or none: backward is a collective too.

        Args:
            problem: What this rank has found wrong with the tree; all ranks raise.
        """
        found = leaves(tree)
        problem = problem or tensors_only("gather_for_loss", found, "gather_object")
        if self.world_size == 1 and problem is None:
            return tree
        specs = {path: leaf_spec(leaf, at_least_1d=True) for path, leaf in found.items()}
        # Backward is a collective, for which ranks with a gradient would wait for those without.
        for path in found if torch.is_grad_enabled() else ():
            if getattr(found[path], "requires_grad", False):
                specs[path] = replace(specs[path], kind=f"{specs[path].kind} with gradient")
        calls = self._exchange_calls(CollectiveCall("gather_for_loss", specs), problem, free_dim=0)
        results = {}
        for path in sorted(found):
            rows = [other.leaves[path].shape[0] for other in calls]
            results[path] = _GatherRows.apply(found[path], self, rows)
        return map_leaves(lambda path, _: results[path], tree)

    def reduce(self, tree: Tree, reduction: Reduction = "mean", scale: float = 1.0) -> Tree:
        """Replace every tensor by its sum, mean or maximum over the ranks, times ``scale``, with its dtype.

        float16 and bfloat16 are summed in float32 and rounded once. The mean of integers is
        floating-point, the sum of booleans counts them. "none" returns the tree as it is.

        Raises:
            ValueError: another ``reduction``.
        """
        if reduction not in ("mean", "sum", "max", "none"):
            raise ValueError(f"reduction is {reduction!r}, but must be 'mean', 'sum', 'max' or 'none'.")
        if reduction == "none":
            return tree
        found = leaves(tree)
        name = f"reduce(reduction={reduction!r}, scale={scale!r})"
        call = CollectiveCall(name, {path: leaf_spec(leaf) for path, leaf in found.items()})
        self._exchange_calls(call, tensors_only("reduce", found, "gather_object"))
        results = {path: self._reduce_tensor(found[path], reduction, scale) for path in sorted(found)}
        return map_leaves(lambda path, _: results[path], tree)

    def broadcast(self, tree: Tree, from_process: int = 0) -> Tree:
        """Overwrite every tensor, in place, with that of rank ``from_process``; returns the tree."""
        if self.world_size == 1:
            return tree
        self._check_rank(from_process)
        found = leaves(tree)
        call = CollectiveCall(
            f"broadcast(from_process={from_process})", {p: leaf_spec(leaf) for p, leaf in found.items()}
        )
        self._exchange_calls(call, tensors_only("broadcast", found, "broadcast_object_list"))
        for path in sorted(found):
            tensor = found[path].detach()
            data = as_bytes(self._carried(tensor))
            if data.numel() > 0:
                dist.broadcast(data, group=self._group, group_src=from_process)
                # A copy travelled where the tensor is on another device, or not contiguous.
                if data.data_ptr() != tensor.data_ptr():
                    tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
        return tree

    def pad_across_processes(
        self, tree: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Tree:
        """Pad every tensor with ``pad_index`` along ``dim`` to the largest size on any rank.

        Padding goes to the end, or to the beginning with ``pad_first``. Tensors without such a dim
        stay as they are, as do nested tensors, with a warning; sizes along other dims may differ.
        """
        found = leaves(tree)
        nested = {path for path, leaf in found.items() if isinstance(leaf, torch.Tensor) and leaf.is_nested}
        if nested:
            warnings.warn(
                "pad_across_processes leaves nested tensors as they are. Pass ordinary tensors to have them padded.",
                CannotPadNestedTensorWarning,
                stacklevel=3,
            )
        if self.world_size == 1:
            return tree
        found = {path: leaf for path, leaf in found.items() if path not in nested}
        call = CollectiveCall(
            f"pad_across_processes(dim={dim})", {p: leaf_spec(leaf) for p, leaf in found.items()}
        )
        problem = tensors_only("pad_across_processes", found, "gather_object")
        calls = self._exchange_calls(call, problem, any_shape=True)

        def pad(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if path in nested or not -tensor.ndim <= dim < tensor.ndim:
                return tensor
            largest = max(other.leaves[path].shape[dim] for other in calls)
            if largest == tensor.shape[dim]:
                return tensor
            shape = list(tensor.shape)
            shape[dim] = largest
            padded = tensor.new_full(shape, pad_index)
            start = largest - tensor.shape[dim] if pad_first else 0
            padded.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
            return padded

        return map_leaves(pad, tree)

    def gather_object(self, value: object) -> list[Any]:
        """Return the lists of all ranks joined in rank order; a value that is no list counts as one element.

        Values travel as pickles.
        """
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if self.world_size == 1:
            return values
        payload, problem = pickled(values, "gather_object")
        self._exchange_calls(GATHER_OBJECT, problem)
        payloads = [payload] * self.world_size
        dist.all_gather_object(payloads, payload, group=self._group)
        return [one for other in payloads for one in pickle.loads(other)]

    def gather_alike(self, value: object, error: Exception | None = None) -> list[Any]:
        """Return ``value`` of every rank, in rank order, where they are mostly the same: then two numbers travel, no
        pickle.

        Args:
            value: Equal where its ``repr`` is.
            error: Raised on all ranks if one passes it; see ``error_barrier``.
        """
        if self.world_size == 1:
            self._exchange_calls(GATHER_ALIKE, error)
            return [value]
        numbers: list[int] = []
        self._exchange_calls(GATHER_ALIKE, error, content=CollectiveCall(repr(value)).digest, numbers=numbers)
        return [value] * self.world_size if len(set(numbers)) == 1 else self._exchange(value)

    def broadcast_object_list(self, values: list[Any], from_process: int = 0) -> list[Any]:
        """Overwrite the elements, in place, with those of rank ``from_process``; returns the list."""
        if self.world_size == 1:
            return values
        self._check_rank(from_process)
        payload, problem = b"", None
        if self.runtime.rank == from_process:
            payload, problem = pickled(values, "broadcast_object_list")
        name = f"broadcast_object_list(list of {len(values)}, from_process={from_process})"
        self._exchange_calls(CollectiveCall(name), problem)
        objects = [payload]
        dist.broadcast_object_list(
            objects, group=self._group, group_src=from_process, device=self._control_device
        )
        if self.runtime.rank != from_process:
            values[:] = pickle.loads(objects[0])
        return values

    @torch.no_grad()
    def transfer(
        self, tensor: torch.Tensor | None, like: torch.Tensor, from_process: int, to_process: int
    ) -> torch.Tensor | None:
        """Return ``tensor`` of rank ``from_process`` on rank ``to_process``, in host memory; None on the others.

        Both ranks call it, others may. ``like`` has its shape and dtype, maybe on the meta device.
        """
        rank = self.runtime.rank
        if rank not in (from_process, to_process):
            return None
        if from_process == to_process:
            return None if tensor is None else tensor.detach().cpu()
        if rank == from_process:
            assert tensor is not None
            data = as_bytes(self._carried(tensor.detach()))
            if data.numel():
                dist.send(data, group=self._group, group_dst=to_process)
            return None
        received = self._carried(torch.empty(like.nbytes, dtype=torch.uint8))
        if received.numel():
            dist.recv(received, group=self._group, group_src=from_process)
        return received.cpu().view(like.dtype).view(like.shape)

    def exchange_bytes(
        self,
        sent: Sequence[tuple[torch.Tensor, int]],
        received: Sequence[tuple[torch.Tensor, int]],
        most_bytes: int,
    ) -> None:
        """Send bytes to some ranks, and receive others, in messages of at most ``most_bytes``.

        Each pair is a tensor of uint8, shape (n,), in host memory, and the other rank. Between two ranks both sides
        have the same sizes in the same order.
        """
        requests: list[dist.Work | None] = []
        for data, rank in sent:
            requests += [
                dist.isend(part, group=self._group, group_dst=rank) for part in _parts(data, most_bytes)
            ]
        for data, rank in received:
            requests += [
                dist.irecv(part, group=self._group, group_src=rank) for part in _parts(data, most_bytes)
            ]
        # All are under way before any is waited for: two ranks may have much to send to each other.
        for request in requests:
            if request is not None:
                request.wait()

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise UsageError(
                f"from_process is {rank}, but the ranks are 0 to {self.world_size - 1}. Pass one of them."
            )

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on a device that the process group can communicate."""
        return tensor if tensor.device.type in self._devices else tensor.to(self._control_device)

    def _gather_tensor(self, tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Concatenate (rows[r], ...) of every rank r; shorter ones travel padded."""
        source = self._carried(tensor.detach())
        source = source.reshape(1) if source.ndim == 0 else source
        most, rest = max(rows), source.shape[1:]
        if source.shape[0] < most:
            source = torch.cat([source, source.new_zeros((most - source.shape[0], *rest))])
        # [n, ...] -> bytes [b] -> bytes of all ranks [ranks * b] -> [ranks, n, ...]
        data = as_bytes(source)
        out = data.new_empty(self.world_size * data.numel())
        if data.numel() > 0:
            all_gather_into_tensor(out, data, group=self._group)
        joined = out.view(tensor.dtype).view(self.world_size, most, *rest)
        if min(rows) == most:
            joined = joined.flatten(0, 1)
        else:
            joined = torch.cat([part[:count] for part, count in zip(joined, rows, strict=True)])
        return joined.to(tensor.device)

    def _reduce_tensor(self, tensor: torch.Tensor, reduction: Reduction, scale: float) -> torch.Tensor:
        dtype = SUM_TYPES.get(tensor.dtype, tensor.dtype)
        # A copy, because ``all_reduce`` writes in place and the caller keeps the tensor.
        total = self._carried(tensor.detach()).to(dtype, copy=True, memory_format=torch.contiguous_format)
        if self.world_size > 1 and total.numel() > 0:
            if reduction == "max":
                all_reduce_max(total, self._group)
            else:
                dist.all_reduce(total, group=self._group)
        if reduction == "mean":
            total = total / self.world_size
        if scale != 1:
            total = total * scale
        # int16 was summed in int64 and comes back, unless it became a fraction; of booleans the count stays.
        # Halves are rounded here, once.
        if tensor.dtype.is_floating_point or (tensor.dtype is torch.int16 and total.dtype is dtype):
            total = total.to(tensor.dtype)
        return total.to(tensor.device)


def all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Reduce a contiguous tensor of any shape to the maximum over ranks, in place; NaN where it is NaN on any rank."""
    if not tensor.is_floating_point():
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return
    # gloo's maximum of NaN and a number depends on their order.
    is_nan = tensor.isnan()
    rows = torch.stack([tensor.masked_fill(is_nan, -math.inf), is_nan.to(tensor.dtype)])
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=group)
    tensor.copy_(rows[0].masked_fill(rows[1] > 0, math.nan))


class _GatherRows(torch.autograd.Function):
    """Rank r's [n_r, ...] to [sum of n_r, ...], of which ``rows`` has every n_r; a 0-d tensor is one row."""

    @staticmethod
    def forward(
        ctx: FunctionContext, tensor: torch.Tensor, communicator: Communicator, rows: list[int]
    ) -> torch.Tensor:
        ctx.communicator, ctx.shape = communicator, tensor.shape
        rank = communicator.runtime.rank
        ctx.own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        return communicator._gather_tensor(tensor, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # Each rank's loss depends on the rows of all ranks.
        with waiting_for_ranks():
            total = ctx.communicator._reduce_tensor(gradient, "sum", 1.0)
        return total[ctx.own].reshape(ctx.shape), None, None


@contextmanager
def raise_on_all_ranks(communicator: Communicator) -> Iterator[None]:
    """Run a block on every rank; an exception on one of them is raised on all at its end.

    The block itself must hold no collective, or a rank that failed would leave the others waiting in it.
    """
    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    communicator.error_barrier(raised)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as uint8 [nbytes], a view where possible: every backend can move bytes."""
    # Its strides may be anything.
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def pickled(values: list[object], operation: str) -> tuple[bytes, Exception | None]:
    """Return the pickle, or empty bytes and the error to agree on."""
    try:
        return pickle.dumps(values), None
    except Exception as error:
        # Pickling runs code of any class.
        return b"", TypeError(
            f"{operation} sends values as pickles, but {type(error).__name__}: {error}. "
            "Pass values that can be pickled, or tensors to gather or broadcast."
        )


def _parts(data: torch.Tensor, most_bytes: int) -> list[torch.Tensor]:
    return list(data.split(most_bytes)) if data.numel() else []
