"""Users' collectives that do not belong together raise on all ranks before they run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import SIGNATURES, CallCheck, CommCounter
from lockstep.errors import CollectiveMismatchError

F, D = torch.float32, torch.float64
HERE = Path(__file__).name


def ones(*shape: int, dtype: torch.dtype = F) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


# name -> rank 0's call, rank 1's call, what the message says of rank 0's, and of rank 1's
MISMATCHES: dict[str, tuple[Callable[[], object], Callable[[], object], str, str]] = {
    "shape": (
        lambda: dist.all_reduce(ones(4)),
        lambda: dist.all_reduce(ones(5)),
        "all_reduce(op=SUM) of shape (4,) float32 on cpu",
        "all_reduce(op=SUM) of shape (5,) float32 on cpu",
    ),
    "dtype": (
        lambda: dist.all_reduce(ones(4)),
        lambda: dist.all_reduce(ones(4, dtype=D)),
        "float32",
        "float64",
    ),
    "reduction": (
        lambda: dist.all_reduce(ones(4)),
        lambda: dist.all_reduce(ones(4), op=dist.ReduceOp.MAX),
        "op=SUM",
        "op=MAX",
    ),
    "operation": (
        lambda: dist.all_reduce(ones(4)),
        lambda: dist.broadcast(ones(4), 0),
        "all_reduce",
        "broadcast(group_src=0)",
    ),
    "source": (
        lambda: dist.broadcast(ones(4), 0),
        lambda: dist.broadcast(ones(4), src=1),
        "group_src=0",
        "group_src=1",
    ),
    "barrier": (lambda: dist.barrier(), lambda: dist.all_reduce(ones(1)), "barrier()", "all_reduce"),
    "objects": (
        lambda: dist.all_gather_object([None, None], 1),
        lambda: dist.broadcast_object_list([None]),
        "all_gather_object",
        "broadcast_object_list",
    ),
    "list": (
        lambda: dist.all_gather([ones(2), ones(2)], ones(2)),
        lambda: dist.all_gather([ones(3), ones(3)], ones(3)),
        "shape (2,)",
        "shape (3,)",
    ),
    "one of the list": (
        lambda: dist.all_gather([ones(2), ones(2)], ones(2)),
        lambda: dist.all_gather([ones(2), ones(2)], ones(3)),
        "shape (2,)",
        "shape (3,)",
    ),
    "all_to_all": (
        lambda: dist.all_to_all_single(ones(3), ones(4), [1, 2], [2, 2]),
        lambda: dist.all_to_all_single(ones(4), ones(2), [2, 2], [1, 1]),
        "shape (3,)",
        "shape (4,)",
    ),
    "into tensor": (
        lambda: dist.all_gather_into_tensor(ones(4), ones(2)),
        lambda: dist.all_gather_into_tensor(ones(6), ones(3)),
        "shape (2,)",
        "shape (3,)",
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter_tensor(ones(2), ones(4)),
        lambda: dist.reduce_scatter_tensor(ones(3), ones(6)),
        "shape (4,)",
        "shape (6,)",
    ),
    "reduce and gather": (
        lambda: dist.reduce(ones(4), 0),
        lambda: dist.gather(ones(4), dst=0),
        "reduce(op=SUM, group_dst=0)",
        "gather(group_dst=0)",
    ),
    "asynchronous": (
        lambda: dist.all_reduce(ones(4), async_op=True).wait(),
        lambda: dist.all_reduce(ones(4, dtype=torch.float16), async_op=True).wait(),
        "float32",
        "float16",
    ),
}


def all_mismatches() -> list[str]:
    """What this rank raises, one after the other: what is found before it runs leaves the group intact."""
    dist.init_process_group("gloo")
    messages = []
    check = CallCheck()
    check.install()
    for name, calls in MISMATCHES.items():
        if name == "asynchronous":  # the only one that is under way when it is found
            value = torch.ones(3)
            dist.all_reduce(value)
            assert value.tolist() == [2, 2, 2]
        try:
            calls[dist.get_rank()]()
            messages.append("nothing raised")
        except CollectiveMismatchError as error:
            messages.append(str(error))
    check.uninstall()
    return messages


def test_every_kind_of_mismatch_is_raised_on_all_ranks_with_both_calls_and_lines(
    run_distributed: Callable[..., list[Any]],
) -> None:
    first, second = run_distributed(all_mismatches, 2)
    for (name, (call, _, words, other_words)), message in zip(MISMATCHES.items(), first, strict=True):
        assert message.startswith("The ranks called "), (name, message)
        _, mine, theirs, advice = message.splitlines()
        assert mine.startswith("  rank 0: ") and words in mine, (name, message)
        assert theirs.startswith("  rank 1: ") and other_words in theirs, (name, message)
        assert advice.endswith(".")
        number = call.__code__.co_firstlineno  # type: ignore[attr-defined]
        assert mine.endswith(f"{HERE}:{number})"), (name, message)
    assert first == second


def last_number() -> int:
    """Of the main group's last collective in torch's flight recorder."""
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))["entries"]
    of_main = [one for one in entries if one["process_group"][0] == "0"]  # also of earlier main groups
    return max(of_main, key=lambda one: one["time_created_ns"])["collective_seq_id"]


def permitted() -> dict[str, Any]:
    """Calls that belong together give what torch gives, and nothing of torch changes for others."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    originals = {name: getattr(dist, name) for name in SIGNATURES if hasattr(dist, name)}
    imported_before = dist.all_reduce
    check = CallCheck()
    check.install()
    check.install()
    results: dict[str, Any] = {}
    mine = torch.arange(4.0) + rank

    value = mine.clone()
    dist.all_reduce(value)
    results["all_reduce"] = value.tolist()
    value = mine.clone().reshape(2, 2) if rank else mine.clone()
    dist.all_reduce(value)  # as many elements in another shape
    results["reshaped"] = value.flatten().tolist()
    handle = dist.all_reduce(value, async_op=True)
    assert isinstance(handle, dist.Work)
    handle.wait()
    assert handle.is_completed()
    parts = [torch.empty(4), torch.empty(4)]
    dist.all_gather(parts, mine)
    results["all_gather"] = torch.cat(parts).tolist()
    out = torch.empty(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_into_tensor(out, mine)
    results["into"] = out.tolist()
    taken = torch.empty(3 if rank else 1)
    splits = ([1, 2], [0, 2]) if rank else ([1, 0], [1, 1])
    dist.all_to_all_single(taken, torch.full((2,), float(rank)), *splits)
    results["all_to_all"] = taken.tolist()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, f"rank {rank}")
    results["objects"] = objects
    box = [rank]
    dist.broadcast_object_list(box, src=1)
    results["box"] = box
    dist.barrier()
    dist.reduce(mine.clone(), dst=1)
    dist.gather(mine, [torch.empty(4), torch.empty(4)] if rank == 1 else None, dst=1)
    dist.scatter(torch.empty(4), [mine, mine] if rank == 0 else None, src=0)
    pair = dist.new_group([1, 0])
    dist.broadcast(value, src=0, group=pair)
    alone = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(value, group=alone)

    # The ranks may do other things between an asynchronous call and the wait.
    if rank == 0:
        handle = dist.all_reduce(torch.ones(2), async_op=True)
        dist.send(torch.ones(1), 1)
        handle.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(2))
    # Handles that nobody waits for.
    for _ in range(70):
        dist.all_reduce(torch.ones(1), async_op=True)
    dist.barrier()

    # Two calls in flight whose handles are waited for in the other order.
    handles = [dist.all_reduce(torch.ones(size), async_op=True) for size in (2, 3)]
    for handle in reversed(handles) if rank else handles:
        handle.wait()

    with CommCounter() as counter:
        dist.all_reduce(torch.ones(4))
        dist.barrier()
    results["counter"] = [(one.operation, one.payload_bytes) for one in counter.records]
    number = last_number()
    dist.all_reduce(torch.ones(4))
    results["numbers"] = last_number() - number

    # A name taken before goes unchecked: rank 1 does not take part in a comparison.
    imported_before(torch.ones(1)) if rank else dist.all_reduce.__wrapped__(torch.ones(1))

    with CommCounter():
        check.uninstall()
        check.install()
        check.uninstall()
    assert not check.is_installed
    dist.all_reduce(torch.ones(1))
    for name in originals:
        setattr(dist, name, originals[name])
    check.install()
    check.uninstall()
    results["restored"] = all(getattr(dist, name) is one for name, one in originals.items())
    return results


def test_calls_that_belong_together_give_what_torch_gives(run_distributed: Callable[..., list[Any]]) -> None:
    for rank, results in enumerate(run_distributed(permitted, 2)):
        assert results["all_reduce"] == results["reshaped"] == [1, 3, 5, 7]
        assert results["all_gather"] == results["into"] == [0, 1, 2, 3, 1, 2, 3, 4]
        assert results["all_to_all"] == ([0, 1, 1] if rank else [0])
        assert results["objects"] == ["rank 0", "rank 1"]
        assert results["box"] == [1]
        assert results["counter"] == [("all_reduce", 16), ("barrier", 0)]
        assert results["numbers"] == 1
        assert results["restored"]


def engines(folder: str) -> dict[str, Any]:
    """torch's own users of collectives, and compiled code, beside an installed check."""
    import torch.distributed._functional_collectives as functional
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    check = CallCheck()
    check.install()
    compared = 0

    def count(*args: Any) -> Any:
        nonlocal compared
        compared += 1
        return compare(*args)

    compare, check._compare = check._compare, count  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    sharded = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    sharded(torch.ones(2, 4)).sum().backward()
    whole = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)]).full_tensor()
    halved = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) / 2
    checkpoint.save({"weight": torch.full((3,), 7.0)}, checkpoint_id=folder)
    loaded = {"weight": torch.zeros(3)}
    checkpoint.load(loaded, checkpoint_id=folder)
    stage = PipelineStage(torch.nn.Linear(4, 4), dist.get_rank(), 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    if dist.get_rank() == 0:
        schedule.step(torch.ones(4, 4))
    else:
        schedule.step(target=torch.ones(4, 4))
    by_engines = compared

    def reduced(value: torch.Tensor) -> torch.Tensor:
        value = value * 2
        dist.all_reduce(value)
        return value + 1

    compiled = torch.compile(reduced, backend="aot_eager", fullgraph=True)(torch.ones(3))
    in_compiled = compared - by_engines
    eager = reduced(torch.ones(3))
    check.uninstall()
    return {
        "engines": by_engines,
        "compiled": (in_compiled, compiled.tolist()),
        "eager": (compared - by_engines, eager.tolist()),
        "whole": whole.tolist(),
        "halved": halved.tolist(),
        "loaded": loaded["weight"].tolist(),
    }


def test_engines_and_compiled_code_are_let_through(
    run_distributed: Callable[..., list[Any]], tmp_path: Path
) -> None:
    for results in run_distributed(engines, 2, str(tmp_path), timeout_s=120):
        assert results == {
            "engines": 0,
            "compiled": (0, [5, 5, 5]),
            "eager": (1, [5, 5, 5]),
            "whole": [0, 1, 2, 3],
            "halved": [1, 1],
            "loaded": [7, 7, 7],
        }


def groups_of_two() -> list[str]:
    """Two groups of two of three ranks: the message names global ranks; the third rank is not in it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    check = CallCheck()
    check.install()
    messages = []
    try:
        dist.all_reduce(torch.ones(rank + 1), group=pair)
    except CollectiveMismatchError as error:
        messages.append(str(error))
    dist.barrier()
    check.uninstall()
    return messages


def test_global_ranks_are_named_and_other_ranks_are_not_concerned(
    run_distributed: Callable[..., list[Any]],
) -> None:
    first, second, third = run_distributed(groups_of_two, 3)
    assert second == []
    assert first == third
    assert "\n  rank 0: all_reduce(op=SUM) of shape (1,)" in first[0]
    assert "\n  rank 2: all_reduce(op=SUM) of shape (3,)" in first[0]


def test_a_check_without_a_process_group_leaves_torch_to_complain() -> None:
    check = CallCheck()
    check.install()
    try:
        with pytest.raises(ValueError, match="[Dd]efault process group"):
            dist.all_reduce(torch.ones(1))
    finally:
        check.uninstall()
