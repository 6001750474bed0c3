"""Step time of one training loop by hand, with Lockstep, Accelerate and Lightning Fabric.

    python benchmarks/step_time.py            # 1 and 2 processes, a small GPT and a digits MLP
    python benchmarks/step_time.py --quick

All contenders live in the same processes and take turns in blocks of steps. Each block has a block of
the hand-written loop next to it, before and after it in turn; a ratio compares these two. One thread a
process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import common

Block = dict[str, float]  # medians of a block's steps: "wall_ms", "cpu_ms"
Pair = tuple[Block, Block]  # of a contender, and of the hand-written loop next to it
UNTIMED = 3  # steps at the beginning of a block, while caches still hold another model
WARM_UP = 20


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="world sizes (default 1 2)")
    parser.add_argument("--tasks", nargs="+", default=["gpt", "digits"], help="gpt, digits (default both)")
    return common.parse_for_blocks(parser, "step_time", rounds=40, quick_rounds=5)


def worker(chosen: argparse.Namespace) -> None:
    """One rank: takes the turns; rank 0 writes every block's medians, in ms."""
    import torch
    import torch.distributed as dist

    from contenders import CONTENDERS, REFERENCE, TASKS

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world_size > 1:
        dist.init_process_group("gloo")
    wanted = [name for name in CONTENDERS if not chosen.only or name == REFERENCE or name in chosen.only]
    pairs: dict[str, dict[str, list[Pair]]] = {}
    for task in chosen.tasks:
        loops = {name: CONTENDERS[name](TASKS[task], rank, world_size) for name in wanted}
        for loop in loops.values():
            for _ in range(WARM_UP):
                next(loop)
        gc.collect()
        gc.freeze()
        assert torch.get_num_threads() == 1
        pairs[task] = {name: [] for name in wanted if name != REFERENCE}
        for turn in range(chosen.rounds):
            for name, taken in pairs[task].items():
                sides = [REFERENCE, name] if turn % 2 else [name, REFERENCE]
                block = {side: time_block(loops[side], chosen.steps, world_size) for side in sides}
                taken.append((block[name], block[REFERENCE]))
    if rank == 0:
        chosen.worker.write_text(json.dumps(pairs))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def time_block(loop: Any, steps: int, world_size: int) -> Block:
    """Medians over a block's steps of wall-clock and of this process's CPU time, in ms."""
    if world_size > 1:
        import torch.distributed as dist

        dist.barrier()
    for _ in range(UNTIMED):
        next(loop)
    return common.time_steps(loop, steps)[0]


def figure(pairs: list[Pair]) -> dict[str, common.Summary]:
    """Step times of a contender, and what they are beside the hand-written loop's."""
    taken = {kind: [ours[kind] for ours, _ in pairs] for kind in ("wall_ms", "cpu_ms")}
    beside = {kind: [plain[kind] for _, plain in pairs] for kind in taken}
    extra = [1e3 * (ours - plain) for ours, plain in zip(taken["cpu_ms"], beside["cpu_ms"], strict=True)]
    return {
        "wall_ms": common.summary(taken["wall_ms"]),
        "cpu_ms": common.summary(taken["cpu_ms"]),
        "reference_wall_ms": common.summary(beside["wall_ms"]),
        "reference_cpu_ms": common.summary(beside["cpu_ms"]),
        "wall_ratio": common.summary(common.ratios(taken["wall_ms"], beside["wall_ms"])),
        "cpu_ratio": common.summary(common.ratios(taken["cpu_ms"], beside["cpu_ms"])),
        "extra_cpu_us": common.summary(extra),
    }


def main() -> None:
    chosen = options()
    if chosen.worker is not None:
        worker(chosen)
        return
    report = common.Report("step_time", "Step time, beside the hand-written loop's")
    rows: list[list[str]] = []
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for world_size in chosen.processes:
            path = Path(folder, f"{world_size}.json")
            common.run_workers(__file__, [*sys.argv[1:], "--worker", str(path)], world_size)
            for task, contenders in json.loads(path.read_text()).items():
                for name, pairs in contenders.items():
                    one = figure(pairs)
                    times = [one["wall_ms"].show(2), one["reference_wall_ms"].show(2)]
                    compared = [
                        one["wall_ratio"].show(),
                        one["cpu_ratio"].show(),
                        one["extra_cpu_us"].show(0),
                    ]
                    rows.append([f"{task}, {world_size}", name, *times, *compared])
                    figures.append(
                        {
                            "task": task,
                            "processes": world_size,
                            "loop": name,
                            **{kind: value.to_dict() for kind, value in one.items()},
                        }
                    )
    report.finish(
        [
            "task, processes",
            "loop",
            "step, ms",
            "hand-written, ms",
            "wall ratio",
            "CPU ratio",
            "extra CPU, µs",
        ],
        rows,
        figures,
        {"rounds": chosen.rounds, "steps": chosen.steps, "untimed": UNTIMED, "threads": 1},
        chosen.output,
        [
            f"Medians (quartiles) over {chosen.rounds} pairs of blocks of {chosen.steps} steps; rank 0.",
            "'hand-written again' is the same loop twice: what differs from 1 there is noise.",
        ],
    )


if __name__ == "__main__":
    main()
