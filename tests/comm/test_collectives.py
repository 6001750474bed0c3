"""Collectives over nested containers against plain torch on the inputs of all ranks."""

from __future__ import annotations

import math
import threading
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from lockstep import Accelerator
from lockstep.comm import Communicator, all_reduce_max, leaves, map_tensors
from lockstep.errors import CollectiveMismatchError, LockstepError
from lockstep.runtime import start_runtime

Pair = namedtuple("Pair", ["first", "second"])
WORLDS = [1, 2, 4]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8,
          torch.bool, torch.complex64, torch.float8_e4m3fn]  # fmt: skip


@dataclass
class Output:
    logits: torch.Tensor
    extra: object


def communicator() -> Communicator:
    return Communicator(start_runtime(cpu=True))


def rank_input(rank: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(rows, 3, generator=generator) * 4).to(dtype)


def nested(rank: int, rows: int) -> dict:
    x = rank_input(rank, rows)
    return {
        "list": [x, (x[:, 0], Pair(x > 1, x.t()[:2].t()))],
        "loss": x.sum(),
        "output": Output(x.clone().requires_grad_(), {"half": x.half()}),
    }


def gather_nested(rows: list[int]) -> dict:
    comm = communicator()
    rank = comm.runtime.rank
    inputs = nested(rank, rows[rank])
    if rank % 2:  # dicts filled in another order are the same dicts
        inputs = dict(reversed(inputs.items()))
    return map_tensors(torch.Tensor.detach, comm.gather(inputs))


@pytest.mark.parametrize("rows", [[2], [2, 2], [3, 1], [0, 2], [0, 0], [1, 2, 0, 4]], ids=str)
def test_gather_is_the_exact_concatenation_in_rank_order(run_distributed, rows):
    inputs = [leaves(nested(rank, count)) for rank, count in enumerate(rows)]
    for result in run_distributed(gather_nested, len(rows), rows):
        assert isinstance(result["output"], Output) and isinstance(result["list"][1][1], Pair)
        for path, found in leaves(result).items():
            parts = [one[path].detach() for one in inputs]
            if len(rows) > 1:
                parts = [part.reshape(1) if part.ndim == 0 else part for part in parts]
            expected = parts[0] if len(parts) == 1 else torch.cat(parts)
            assert found.dtype == expected.dtype and found.equal(expected), path


def gather_dtypes(dtypes: list[torch.dtype]) -> list[tuple[torch.dtype, list]]:
    comm = communicator()
    gathered = comm.gather([rank_input(comm.runtime.rank, 2, dtype) for dtype in dtypes])
    return [(tensor.dtype, tensor.tolist()) for tensor in gathered]


def test_gather_takes_every_dtype(run_distributed):
    for result in run_distributed(gather_dtypes, 2, DTYPES):
        for dtype, found in zip(DTYPES, result, strict=True):
            expected = [*rank_input(0, 2, dtype).tolist(), *rank_input(1, 2, dtype).tolist()]
            assert found == (dtype, expected)


def reduce_dtypes(reduction: str, dtypes: list[torch.dtype], scale: float) -> list[torch.Tensor]:
    comm = communicator()
    inputs = [rank_input(comm.runtime.rank, 2, dtype) for dtype in dtypes]
    kept = [tensor.clone() for tensor in inputs]
    result = comm.reduce(inputs, reduction, scale=scale)
    assert all(one.equal(other) for one, other in zip(inputs, kept, strict=True))
    return result


@pytest.mark.parametrize(
    ("world_size", "reduction", "scale"),
    [(1, "sum", 0.5), (2, "mean", 0.5), (4, "sum", 1.0), (4, "mean", 1.0)],
)
def test_reduce_equals_the_sum_or_mean_of_all_inputs(run_distributed, world_size, reduction, scale):
    dtypes = [dtype for dtype in DTYPES if dtype not in (torch.float8_e4m3fn, torch.uint8)]
    for result in run_distributed(reduce_dtypes, world_size, reduction, dtypes, scale):
        for dtype, found in zip(dtypes, result, strict=True):
            wide = torch.complex128 if dtype.is_complex else torch.float64
            total = sum(rank_input(rank, 2, dtype).to(wide) for rank in range(world_size))
            expected = total * scale / (world_size if reduction == "mean" else 1)
            if dtype.is_floating_point:
                assert found.dtype == dtype
            torch.testing.assert_close(found, expected.to(found.dtype))


def reduce_none_and_unknown() -> tuple[bool, str]:
    comm = communicator()
    value = torch.ones(2)
    with pytest.raises(ValueError) as caught:
        comm.reduce(value, "min")
    return comm.reduce(value, "none") is value, str(caught.value)


def test_reduction_none_changes_nothing_and_others_are_refused(run_distributed):
    for same, message in run_distributed(reduce_none_and_unknown, 2):
        assert same and "'min'" in message


def reduce_max() -> tuple[list[float], list[int]]:
    comm = communicator()
    found = comm.reduce(
        {"x": torch.tensor([1.0, -2.0]) * (comm.runtime.rank + 1), "n": torch.tensor([comm.runtime.rank])},
        "max",
    )
    return found["x"].tolist(), found["n"].tolist()


@pytest.mark.parametrize("world_size", WORLDS)
def test_reduction_max_is_the_largest_of_each_element(run_distributed, world_size):
    for found in run_distributed(reduce_max, world_size):
        assert found == ([float(world_size), -2.0], [world_size - 1])


def broadcast_nested(source: int) -> tuple[dict, bool]:
    comm = communicator()
    inputs = nested(comm.runtime.rank, 2)
    same = comm.broadcast(inputs, from_process=source) is inputs
    return map_tensors(torch.Tensor.detach, inputs), same


@pytest.mark.parametrize(("world_size", "source"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_broadcast_overwrites_in_place_with_the_source(run_distributed, world_size, source):
    expected = leaves(nested(source, 2))
    for result, same in run_distributed(broadcast_nested, world_size, source):
        assert same
        for path, found in leaves(result).items():
            assert found.equal(expected[path].detach()), path


def pad(dim: int, pad_first: bool) -> dict:
    comm = communicator()
    rank = comm.runtime.rank
    inputs = {
        "x": torch.full((2, rank + 1), rank + 1),
        "y": torch.full((rank + 1, 2), 0.5),
        "z": torch.tensor(1),
    }
    return comm.pad_across_processes(inputs, dim=dim, pad_index=-1, pad_first=pad_first)


@pytest.mark.parametrize(
    ("world_size", "pad_first", "dim"), [(1, False, 1), (2, True, -1), (4, False, -1), (4, True, 1)]
)
def test_padding_reaches_the_largest_size_of_any_rank(run_distributed, world_size, pad_first, dim):
    for rank, result in enumerate(run_distributed(pad, world_size, dim, pad_first)):
        missing = world_size - rank - 1
        sides = (missing, 0) if pad_first else (0, missing)
        x = torch.nn.functional.pad(torch.full((2, rank + 1), rank + 1), sides, value=-1)
        assert result["x"].equal(x)
        assert result["y"].equal(torch.full((rank + 1, 2), 0.5)) and result["z"] == 1


def exchange_objects() -> tuple[list, list, list, list]:
    comm = communicator()
    rank = comm.runtime.rank
    lists = comm.gather_object([rank, {"text": "x" * rank}])
    single = comm.gather_object(f"rank {rank}")
    values = [rank, {"from": rank}]
    returned = comm.broadcast_object_list(values, from_process=comm.world_size - 1)
    assert returned is values
    comm.barrier()
    return lists, single, values, comm.gather_object([])


@pytest.mark.parametrize("world_size", WORLDS)
def test_objects_are_joined_in_rank_order_and_broadcast_in_place(run_distributed, world_size):
    for lists, single, values, empty in run_distributed(exchange_objects, world_size):
        assert lists == [one for rank in range(world_size) for one in (rank, {"text": "x" * rank})]
        assert single == [f"rank {rank}" for rank in range(world_size)]
        assert values == [world_size - 1, {"from": world_size - 1}]
        assert empty == []


def mismatch(case: str) -> str:
    comm = communicator()
    rank, one = comm.runtime.rank, torch.ones(1)
    is_first = rank == 0
    shape, dtype = [((2, 3), torch.float32), ((2, 4), torch.float16)][rank]
    calls = {
        "operation": lambda: comm.gather(torch.ones(2)) if is_first else comm.reduce(torch.ones(2)),
        "argument": lambda: comm.broadcast(torch.ones(2), from_process=rank),
        "shape": lambda: comm.gather({"a": one, "b": [torch.ones(shape)]}),
        "dtype": lambda: comm.gather(torch.ones(2, dtype=dtype)),
        "dims": lambda: comm.pad_across_processes(torch.ones([2] * (rank + 1)), dim=0),
        "rows of reduce": lambda: comm.reduce(torch.ones(rank + 1)),
        "structure": lambda: comm.gather({"a": one} if is_first else {"a": one, "b": one}),
        "leaf": lambda: comm.gather([one] if is_first else [1.0]),
        "length": lambda: comm.broadcast_object_list([None] * (rank + 1)),
        "barrier": lambda: comm.barrier() if is_first else comm.gather_object([1]),
    }
    with pytest.raises(CollectiveMismatchError) as caught:
        calls[case]()
    comm.barrier()  # the group is still in step
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "operation",
            ["Rank 0 called Communicator.gather (test_collectives.py:", "rank 1 called Communicator.reduce"],
        ),
        ("argument", ["broadcast(from_process=0)", "broadcast(from_process=1)"]),
        (
            "shape",
            ["['b'][0]", "rank 0: gather shape (2, 3) float32", "shape (2, 4)", "pad_across_processes"],
        ),
        ("dtype", ["rank 0: gather shape (2,) float32", "rank 1: gather shape (2,) float16"]),
        ("dims", ["(2,)", "(2, 2)"]),
        ("rows of reduce", ["shape (1,)", "shape (2,)"]),
        ("structure", ["['b']", "rank 0: gather nothing there"]),
        ("leaf", ["[0]", "rank 1: gather float (no tensor)"]),
        ("length", ["list of 1", "list of 2"]),
        ("barrier", ["Rank 0 called Communicator.barrier", "rank 1 called Communicator.gather_object"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_that_differ_all_raise_with_every_rank_described(run_distributed, case, words):
    messages = run_distributed(mismatch, 2, case)
    assert messages[0].split(" (/")[0] == messages[1].split(" (/")[0]
    for message in messages:
        for word in words:
            assert word in message, message


def wrong_everywhere() -> list[str]:
    comm = communicator()
    messages = []
    for call in (comm.gather, comm.reduce, comm.broadcast, comm.pad_across_processes):
        with pytest.raises(TypeError) as caught:
            call({"loss": [1.0]})
        messages.append(str(caught.value))
    return messages


def test_a_leaf_that_is_no_tensor_is_refused_with_the_way_out(run_distributed):
    for messages in run_distributed(wrong_everywhere, 2):
        assert all("['loss'][0] is a float" in message and "object" in message for message in messages)


def fail_together(kind: str) -> tuple[str, str]:
    comm = communicator()
    rank = comm.runtime.rank
    comm.error_barrier(None)
    with pytest.raises(Exception) as caught:
        if kind == "agree":
            comm.error_barrier(KeyError("only here") if rank == 1 else None)
        elif kind == "gather_object":
            comm.gather_object([threading.Lock() if rank == 1 else 1])
        else:
            comm.broadcast_object_list([threading.Lock()], from_process=1)
    comm.barrier()
    assert rank == 1 or isinstance(caught.value, LockstepError)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("kind", "own", "words"),
    [
        ("agree", "KeyError", "only here"),
        ("gather_object", "TypeError", "pickle"),
        ("broadcast_object_list", "TypeError", "pickle"),
    ],
)
def test_what_one_rank_finds_wrong_stops_all(run_distributed, kind, own, words):
    others, failed = run_distributed(fail_together, 2, kind)
    assert failed[0] == own and words in failed[1]
    assert others[0] == "LockstepError" and "Rank 1 failed" in others[1] and words in others[1]


def test_alone_no_process_group_is_needed_and_nothing_changes():
    from lockstep.runtime import Runtime

    comm = Communicator(Runtime(0, 1, 0, 1, torch.device("cpu"), None))
    value = {"x": torch.tensor(1.0), "n": 3}
    assert comm.gather(value) is value
    assert comm.broadcast(value) is value and comm.pad_across_processes(value) is value
    assert comm.reduce(torch.tensor(2.0), "mean") == 2
    assert comm.gather_object([1, 2]) == [1, 2]
    comm.barrier()
    comm.error_barrier()
    with pytest.raises(KeyError):
        comm.error_barrier(KeyError("x"))


def maxima_with_nan() -> list[list[float]]:
    """By backend, the maximum of a row per rank in which each rank has NaN at another place."""
    accelerator = Accelerator(cpu=True)
    found = [accelerator.reduce(row_with_nan(accelerator.process_index), "max").tolist()]
    if accelerator.num_processes > 1:
        for backend in ("gloo", "shm"):
            for dtype in (torch.float32, torch.float64):
                row = row_with_nan(accelerator.process_index).to(dtype)
                all_reduce_max(row, torch.distributed.new_group(backend=backend))
                found.append(row.tolist())
    return found


def row_with_nan(rank: int) -> torch.Tensor:
    row = torch.arange(6.0) - 3 - rank
    row[rank] = math.nan
    row[5] = -math.inf
    return row


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_maximum_with_nan_is_nan_on_any_rank(run_distributed, world_size):
    rows = [row_with_nan(rank).tolist() for rank in range(world_size)]
    expected = [
        math.nan if any(math.isnan(one) for one in column) else max(column)
        for column in zip(*rows, strict=True)
    ]
    for found in run_distributed(maxima_with_nan, world_size):
        assert len(found) == (1 if world_size == 1 else 5)
        for row in found:
            assert str(row) == str(expected)
