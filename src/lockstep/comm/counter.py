"""Counts collectives and their bytes, whoever issues them.

A dispatch mode sees torch's collective operators, also those of DDP's reducer, which is written
in C++ but calls them through the dispatcher, under the modes of the thread that called backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist

from lockstep.comm.tree import Kwargs
from lockstep.torch_internals import c10d, dispatch
from lockstep.torch_internals.dispatch import OpOverload


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective on this rank. ``payload_bytes`` is the size of the full tensor: what is
    reduced, what is gathered in the end, what is scattered in the beginning."""

    operation: str
    payload_bytes: int
    dtype: torch.dtype | None
    group_size: int

    @property
    def wire_bytes(self) -> Fraction:
        """What this rank sends in a ring of the group's ranks."""
        return WIRE_SHARES[self.operation](self.group_size) * self.payload_bytes


# operation -> group size -> share of the payload that a rank sends (for broadcast and reduce, of
# which a ring's last rank sends nothing, the mean over the ranks).
WIRE_SHARES: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "broadcast": lambda n: Fraction(n - 1, n),
    "reduce": lambda n: Fraction(n - 1, n),
    # n - 1 ranks have one part of 1 / n each to move: on average (n - 1) / n of such a part.
    "gather": lambda n: Fraction(n - 1, n * n),
    "scatter": lambda n: Fraction(n - 1, n * n),
    "send": lambda n: Fraction(1),
    "recv": lambda n: Fraction(0),
    "barrier": lambda n: Fraction(0),
}

# operator -> operation, the argument that holds the payload, and whether that argument is only one
# rank's part of it. The variants (in place, coalesced) share their base name.
OPERATORS: dict[str, tuple[str, str, bool]] = {
    "c10d::allreduce_": ("all_reduce", "tensors", False),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors", False),
    "c10d::allgather_": ("all_gather", "input_tensors", True),
    "c10d::_allgather_base_": ("all_gather", "input_tensor", True),
    "c10d::allgather_coalesced_": ("all_gather", "input_list", True),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "inputs", True),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors", False),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor", False),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", False),
    "c10d::alltoall_": ("all_to_all", "input_tensors", False),
    "c10d::alltoall_base_": ("all_to_all", "input", False),
    "c10d::broadcast_": ("broadcast", "tensors", False),
    "c10d::reduce_": ("reduce", "tensors", False),
    "c10d::gather_": ("gather", "input_tensors", True),
    "c10d::scatter_": ("scatter", "output_tensors", True),
    "c10d::send": ("send", "tensors", False),
    "c10d::recv_": ("recv", "tensors", False),
    "c10d::recv_any_source_": ("recv", "tensors", False),
    "c10d::barrier": ("barrier", "", False),
    "_c10d_functional::all_reduce": ("all_reduce", "input", False),
    "_c10d_functional::all_reduce_": ("all_reduce", "input", False),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs", False),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs", False),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input", True),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "input", True),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "inputs", True),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input", False),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input", False),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs", False),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input", False),
    "_c10d_functional::broadcast": ("broadcast", "input", False),
    "_c10d_functional::broadcast_": ("broadcast", "input", False),
}


# Functions that communication hooks call from the backend's own threads when a first collective is
# done (PowerSGD does), where the modes of the thread that called backward are not active.
CALLED_BY_HOOKS = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast")


class _Recorder(dispatch.TorchDispatchMode):
    """Appends a record per collective operator of the thread in which it is active."""

    def __init__(self, records: list[CollectiveRecord]) -> None:
        super().__init__()
        self.records = records

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        # DTensor, whose import takes most of a second.
        if any(hasattr(kind, "device_mesh") for kind in types):
            # Its turn comes first, and it issues its collectives as operators of their own.
            return NotImplemented
        known = OPERATORS.get(dispatch.schema_of(func).name)
        if known is not None:
            self.records.append(record(func, known, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class CommCounter:
    """A context manager that records the collectives of this rank inside of the block, in their order, in
    ``records``.

    It records calls of ``torch.distributed``, of this library, of torch's engines and of communication hooks. It
    records those of the thread that entered the block, and those that torch makes for it in other threads. It costs a
    Python call for each operator. Use it for tests and measurements, not in every step.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator

        accelerator = Accelerator()
        with accelerator.communication() as counter:
            accelerator.gather(torch.ones(1000))
        accelerator.print(counter.table())  # each operation with its calls and bytes
        assert counter.payload_bytes() >= 4000 * counter.count("all_gather")
        assert counter.wire_bytes() >= 4000 * (accelerator.num_processes - 1)
        ```
    """

    def __init__(self) -> None:
        self.records: list[CollectiveRecord] = []
        self._exits = ExitStack()

    def __enter__(self) -> CommCounter:
        dispatch.probe()
        owner = threading.get_ident()
        for name in CALLED_BY_HOOKS:
            original = getattr(dist, name)
            setattr(dist, name, self._recorded_elsewhere(original, owner))
            self._exits.callback(setattr, dist, name, original)
        self._exits.enter_context(_Recorder(self.records))
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def _recorded_elsewhere(self, original: Callable[..., object], owner: int) -> Callable[..., object]:
        """Record ``original`` when it is called in a thread other than ``owner``'s."""

        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            if threading.get_ident() == owner:
                return original(*args, **kwargs)
            with _Recorder(self.records):
                return original(*args, **kwargs)

        return call

    def count(self, operation: str | None = None) -> int:
        """Return the number of collectives.

        Args:
            operation: An operation, such as ``"all_reduce"``. None: all of them.

        Raises:
            ValueError: there is no such operation.
        """
        return len(self._records_of(operation))

    def payload_bytes(self, operation: str | None = None) -> int:
        """Return the bytes of the tensors that collectives were called with.

        Args:
            operation: An operation, such as ``"all_reduce"``. None: all of them.

        Raises:
            ValueError: there is no such operation.
        """
        return sum(one.payload_bytes for one in self._records_of(operation))

    def wire_bytes(self, operation: str | None = None) -> float:
        """Return the bytes that this rank sends by the ring formulas, such as 2 (N-1)/N of the payload of an
        all-reduce.

        Args:
            operation: An operation, such as ``"all_reduce"``. None: all of them.

        Raises:
            ValueError: there is no such operation.
        """
        return float(sum(one.wire_bytes for one in self._records_of(operation)))

    def table(self) -> str:
        """Return a text table. Each operation has a line with its count, payload bytes and bytes sent."""
        names = sorted({one.operation for one in self.records})
        lines = [f"{'operation':<16}{'count':>8}{'payload bytes':>16}{'wire bytes':>16}"]
        for name in names:
            counts = f"{self.count(name):>8}{self.payload_bytes(name):>16}{self.wire_bytes(name):>16.0f}"
            lines.append(f"{name:<16}{counts}")
        return "\n".join(lines)

    def _records_of(self, operation: str | None) -> list[CollectiveRecord]:
        if operation is not None and operation not in WIRE_SHARES:
            raise ValueError(f"operation is {operation!r}, but must be one of {', '.join(WIRE_SHARES)}.")
        return [one for one in self.records if operation is None or one.operation == operation]


def record(
    func: object, known: tuple[str, str, bool], args: tuple[object, ...], kwargs: dict[str, object]
) -> CollectiveRecord:
    operation, name, is_part = known
    names = dispatch.argument_names(func)
    given = dict(zip(names, args, strict=False)) | kwargs
    size = group_size(given)
    tensors = list(tensors_in(given.get(name)))
    payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    dtype = tensors[0].dtype if tensors else None
    return CollectiveRecord(operation, payload * size if is_part else payload, dtype, size)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def group_of(given: Kwargs) -> dist.ProcessGroup:
    """Return the group in an operator's arguments: an object, or the name of one."""
    if "group_name" in given:
        name = given["group_name"]
        group: dist.ProcessGroup = c10d.group_named(name) if isinstance(name, str) else name
        return group
    # By its name: a group that shares memory is shown to operators through another one.
    return c10d.group_named(dist.ProcessGroup.unbox(given["process_group"]).group_name)


def group_size(given: dict[str, object]) -> int:
    """Return the number of ranks of the group in an operator's arguments."""
    return int(group_of(given).size())


def ranks_of(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[int, ...]:
    """Return the global ranks of the group in an operator's arguments."""
    given = dict(zip(dispatch.argument_names(func), args, strict=False)) | kwargs
    return tuple(dist.get_process_group_ranks(group_of(given)))
