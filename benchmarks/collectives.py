"""ZeRO's two collectives on the CPU: gloo's own, and those of ``lockstep.parallel.zero.exchange``.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --quick

All four take turns in the same processes, a call each, on buffers of the same size. Shown is the time of a call
on rank 0, and its ratio to gloo's call in the same round. Both forms send the same bytes.
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

SIZES_MIB = (0.25, 1, 4, 16)
PAIRS = {"broadcasts": "all-gather", "exchange": "reduce-scatter"}  # ours -> gloo's


def calls(mib: float) -> dict[str, Callable[[], Any]]:
    """The four collectives on buffers whose whole has this many MiB."""
    import torch
    import torch.distributed as dist

    from lockstep.comm.collectives import all_gather_into_tensor, reduce_scatter_tensor
    from lockstep.parallel.zero.exchange import BroadcastAllGather, ExchangeReduceScatter

    group: Any = dist.group.WORLD
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.ones(int(mib * 2**18) // ranks * ranks)
    gathered, reduced = torch.empty_like(whole), torch.empty(whole.numel() // ranks)
    shard = gathered.chunk(ranks)[rank]
    broadcasts, exchange = BroadcastAllGather(), ExchangeReduceScatter()
    return {
        "all-gather": lambda: all_gather_into_tensor(gathered, shard),
        "broadcasts": lambda: broadcasts(gathered, shard, group),
        "reduce-scatter": lambda: reduce_scatter_tensor(reduced, whole, dist.ReduceOp.AVG),
        "exchange": lambda: exchange(reduced, whole, group, dist.ReduceOp.AVG),
    }


def work(rounds: int, output: str) -> None:
    """On each rank: time every collective in every round; rank 0 writes the times in ms."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    times: dict[str, dict[str, list[float]]] = {}
    for mib in SIZES_MIB:
        table = calls(mib)
        found: dict[str, list[float]] = {name: [] for name in table}
        for number in range(rounds + 3):
            for name, call in list(table.items())[:: -1 if number % 2 else 1]:
                dist.barrier()
                start = time.perf_counter()
                call()
                if number >= 3:  # the first ones open connections
                    found[name].append(1e3 * (time.perf_counter() - start))
        times[str(mib)] = found
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
    rounds = 5 if options.quick else 60
    report = common.Report("collectives", "ms a call on rank 0: median (quartiles), and ratio to gloo's own")
    rows, figures = [], []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            output = os.path.join(folder, "times.json")
            common.run_workers(__file__, ["--worker", str(rounds), output], ranks)
            measured = json.loads(Path(output).read_text())
        for mib, times in measured.items():
            for ours, theirs in PAIRS.items():
                ratio = common.summary(common.ratios(times[ours], times[theirs]))
                mine, gloo = common.summary(times[ours]), common.summary(times[theirs])
                rows.append(
                    [f"{ranks} ranks, {mib} MiB", theirs, gloo.show(2), ours, mine.show(2), ratio.show(2)]
                )
                figures.append(
                    {
                        "ranks": ranks,
                        "mib": float(mib),
                        "collective": theirs,
                        "gloo_ms": gloo.to_dict(),
                        "ours_ms": mine.to_dict(),
                        "ratio": ratio.to_dict(),
                    }
                )
    columns = ["group and buffer", "gloo's", "ms", "ours", "ms", "ours / gloo's"]
    report.finish(columns, rows, figures, {"rounds": rounds, "sizes_mib": SIZES_MIB}, options.output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), sys.argv[3])
    else:
        main()
