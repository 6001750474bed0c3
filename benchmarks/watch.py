"""What the watch for hangs costs: the same training with it and without, in turns, in the same two processes.

    python benchmarks/watch.py
    python benchmarks/watch.py --quick

Without a launcher of ours rank 0 is the coordinator too, so that this is the dearest case. The counters in the loop,
which are there in both, are timed by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import common

STEPS_COUNTED = 20_000


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return common.parse_for_blocks(parser, "watch", rounds=40, quick_rounds=2)


def training() -> Iterator[None]:
    """Endless; yields after every step."""
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from contenders import SmallGPT
    from lockstep import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = SmallGPT(width=128, layers=2)
    loader = DataLoader(TensorDataset(torch.randint(0, 256, (4096, 65))), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    while True:
        for (tokens,) in loader:
            logits = model(tokens[:, :-1])
            accelerator.backward(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
            optimizer.step()
            optimizer.zero_grad()
            yield


def time_block(loop: Iterator[None], steps: int) -> tuple[float, float]:
    """Means of a block's steps without the first, in ms: by the clock, and of this process's CPU time."""
    import torch.distributed as dist

    next(loop)
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(steps):
        next(loop)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    return wall * 1e3 / steps, cpu * 1e3 / steps


def counters_us() -> float:
    """Microseconds that counting takes in one step."""
    from lockstep.runtime import StepClock

    clock = StepClock()
    start = time.perf_counter()
    for _ in range(STEPS_COUNTED):
        clock.batch_wanted()
        clock.backward_begins()
        clock.stepped()
    return (time.perf_counter() - start) * 1e6 / STEPS_COUNTED


def worker(chosen: argparse.Namespace) -> None:
    """One rank: takes the turns; rank 0 writes pairs of (with the watch, without), each (wall, CPU) in ms a step."""
    import torch

    from lockstep.observe.hang import watch_process
    from lockstep.runtime import current_runtime

    torch.set_num_threads(1)
    loop = training()
    for _ in range(5):
        next(loop)
    runtime = current_runtime()
    assert runtime is not None
    watch_process(runtime, enabled=True, grace_s=30).end()
    pairs = []
    for turn in range(chosen.rounds):
        block: dict[bool, tuple[float, float]] = {}
        for watched in (True, False) if turn % 2 else (False, True):
            watch = watch_process(runtime, enabled=True, grace_s=30) if watched else None
            block[watched] = time_block(loop, chosen.steps)
            if watch is not None:
                watch.end()
        pairs.append((block[True], block[False]))
    if runtime.rank == 0:
        chosen.worker.write_text(json.dumps({"pairs": pairs, "counters_us": counters_us()}))
    os._exit(0)


def main() -> None:
    chosen = options()
    if chosen.worker is not None:
        worker(chosen)
        return
    report = common.Report("watch", "The watch for hangs, 2 processes, rank 0 being the coordinator")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        common.run_workers(__file__, [*sys.argv[1:], "--worker", str(path)], 2)
        found = json.loads(path.read_text())
    step = common.summary([plain[0] for _, plain in found["pairs"]])
    wall, cpu = (
        common.summary([watched[kind] / plain[kind] for watched, plain in found["pairs"]]) for kind in (0, 1)
    )
    counters = found["counters_us"]
    rows = [
        ("step without, ms", step.show(2)),
        ("step with / without, wall", wall.show(4)),
        ("step with / without, CPU time", cpu.show(4)),
        ("counters in a step, us", f"{counters:.1f} = {counters / 1e3 / step.median:.3%} of a step"),
    ]
    figures = {
        "step_ms": step.to_dict(),
        "wall_ratio": wall.to_dict(),
        "cpu_ratio": cpu.to_dict(),
        "counters_us": counters,
    }
    settings = {"rounds": chosen.rounds, "steps": chosen.steps}
    report.finish(["", "measured"], rows, figures, settings, chosen.output)


if __name__ == "__main__":
    main()
