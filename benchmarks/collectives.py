"""Collectives of CPU tensors on one host: through memory that the ranks share, and through gloo.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --quick

Both backends take turns in the same processes, a call each, on the same buffers. Shown is the time of a call on rank 0,
and the ratio of the two in the same round. A size is what lies on one rank before the call, or after it for gathers.
The last rows are the forms of ZeRO's collectives that ``lockstep.parallel.zero`` has for gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

SIZES_KIB = (64, 1024, 32 * 1024)
# a call of the shared memory, or another form for gloo -> gloo's own call
ON_GLOO = {"broadcasts, gloo": "all_gather", "exchange, gloo": "reduce_scatter"}


def calls(size_kib: int, group: Any) -> dict[str, Callable[[], Any]]:
    """The collectives of a group, on buffers of this size."""
    import torch
    import torch.distributed as dist

    from lockstep.comm import all_gather_into_tensor, reduce_scatter_tensor

    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.ones(size_kib * 256 // ranks * ranks)
    gathered, reduced = torch.empty_like(whole), torch.empty(whole.numel() // ranks)
    shard = gathered.chunk(ranks)[rank]

    def message() -> None:
        if rank < 2:
            dist.send(whole, 1, group=group) if rank == 0 else dist.recv(whole, 0, group=group)

    def gather() -> None:
        dist.gather(reduced, list(gathered.chunk(ranks)) if rank == 0 else None, 0, group=group)

    def scatter() -> None:
        dist.scatter(reduced, list(whole.chunk(ranks)) if rank == 0 else None, 0, group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather_into_tensor(gathered, shard, group=group),
        "reduce_scatter": lambda: reduce_scatter_tensor(reduced, whole, dist.ReduceOp.AVG, group=group),
        "all_to_all": lambda: dist.all_to_all_single(gathered, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "reduce": lambda: dist.reduce(whole, 0, group=group),
        "gather": gather,
        "scatter": scatter,
        "send": message,
        "barrier": lambda: dist.barrier(group=group),
    }


def forms_on_gloo(size_kib: int, group: Any) -> dict[str, Callable[[], Any]]:
    """ZeRO's collectives in other forms, on a gloo group."""
    import torch
    import torch.distributed as dist

    from lockstep.parallel.zero import BroadcastAllGather, ExchangeReduceScatter

    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.ones(size_kib * 256 // ranks * ranks)
    gathered, reduced = torch.empty_like(whole), torch.empty(whole.numel() // ranks)
    broadcasts, exchange = BroadcastAllGather(), ExchangeReduceScatter()
    return {
        "broadcasts, gloo": lambda: broadcasts(gathered, gathered.chunk(ranks)[rank], group),
        "exchange, gloo": lambda: exchange(reduced, whole, group, dist.ReduceOp.AVG),
    }


def work(rounds: int, output: str) -> None:
    """On each rank: time every collective in every round; rank 0 writes the times in ms."""
    import torch.distributed as dist

    from lockstep import shared_memory

    shared_memory.register()
    dist.init_process_group("gloo")
    shm, gloo = dist.new_group(backend="shm"), dist.group.WORLD
    times: dict[str, dict[str, list[float]]] = {}
    for size in SIZES_KIB:
        table = {f"{name}, gloo": call for name, call in calls(size, gloo).items()}
        table |= calls(size, shm) | forms_on_gloo(size, gloo)
        found: dict[str, list[float]] = {name: [] for name in table}
        for number in range(rounds + 3):
            for name, call in list(table.items())[:: -1 if number % 2 else 1]:
                dist.barrier()
                start = time.perf_counter()
                call()
                if number >= 3:  # the first ones open connections
                    found[name].append(1e3 * (time.perf_counter() - start))
        times[str(size)] = found
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(times))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few rounds: shows that it runs, proves little"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of processes")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/collectives.json)")
    options = parser.parse_args()
    rounds = 5 if options.quick else 40
    report = common.Report("collectives", "ms a call on rank 0: median (quartiles), and ratio to gloo's own")
    rows, figures = [], []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            output = os.path.join(folder, "times.json")
            common.run_workers(__file__, ["--worker", str(rounds), output], ranks)
            measured = json.loads(Path(output).read_text())
        for size, times in measured.items():
            for name in times:
                other = f"{ON_GLOO.get(name, name)}, gloo"
                if name == other or other not in times:
                    continue
                ratio = common.summary(common.ratios(times[name], times[other]))
                mine, gloo = common.summary(times[name]), common.summary(times[other])
                rows.append([f"{ranks} ranks, {size} KiB", name, mine.show(2), gloo.show(2), ratio.show(2)])
                figures.append(
                    {
                        "ranks": ranks,
                        "kib": int(size),
                        "collective": name,
                        "gloo_ms": gloo.to_dict(),
                        "ms": mine.to_dict(),
                        "ratio": ratio.to_dict(),
                    }
                )
    columns = ["group and buffer", "collective", "ms", "gloo's, ms", "ratio"]
    report.finish(columns, rows, figures, {"rounds": rounds, "sizes_kib": SIZES_KIB}, options.output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), sys.argv[3])
    else:
        main()
