"""Microseconds that each call of the training loop costs more than torch's own, on a tiny model.

    python benchmarks/overhead.py

One process; every call beside what it stands for, taking turns; the fastest of many repeats, because
what disturbs a run can only make it slower.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 40")
    parser.add_argument("--repeats", type=int, help="repeats of each measurement (default 40, quick 5)")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/overhead.json)")
    chosen = parser.parse_args()
    chosen.repeats = chosen.repeats or (5 if chosen.quick else 40)
    return chosen


def time_us(call: Callable[[], Any], number: int) -> float:
    """Mean CPU time of one of ``number`` calls."""
    start = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - start) / number * 1e6


def make_calls() -> dict[str, tuple[Callable[[], Any], Callable[[], Any], int, int]]:
    """Call -> (torch's own, Lockstep's, calls a repeat, units of work in one call)."""
    import torch
    from torch.nn.utils import clip_grad_norm_
    from torch.utils.data import DataLoader

    from contenders import MAX_NORM, TASKS, loss_of, optimizer_of
    from lockstep import Accelerator

    torch.set_num_threads(1)
    task = TASKS["digits"]
    accelerator = Accelerator(cpu=True)
    model, data = task.model(), task.data(1)
    plain_optimizer = optimizer_of(model)
    plain_loader = DataLoader(data, task.batch_size, shuffle=True)
    prepared, optimizer, loader = accelerator.prepare(
        model, plain_optimizer, DataLoader(data, task.batch_size, shuffle=True)
    )
    inputs, targets = next(iter(plain_loader))
    loss_of(prepared(inputs), targets).backward()
    leaf = torch.zeros(1, requires_grad=True)

    def accumulated() -> None:
        with accelerator.accumulate(prepared):
            pass

    return {
        "next batch": (lambda: exhaust(plain_loader), lambda: exhaust(loader), 1, task.batches),
        "accumulate": (lambda: None, accumulated, 1000, 1),
        "backward": (lambda: leaf.sum().backward(), lambda: accelerator.backward(leaf.sum()), 1000, 1),
        "clip_grad_norm_": (
            lambda: clip_grad_norm_(model.parameters(), MAX_NORM),
            lambda: accelerator.clip_grad_norm_(prepared.parameters(), MAX_NORM),
            300,
            1,
        ),
        "step": (plain_optimizer.step, optimizer.step, 100, 1),
        # Gradients cleared once stay cleared: what is left is the cost of the call.
        "zero_grad": (plain_optimizer.zero_grad, optimizer.zero_grad, 1000, 1),
    }


def exhaust(loader: Any) -> None:
    for _ in loader:
        pass


def main() -> None:
    chosen = options()
    report = common.Report("overhead", "CPU time of one call, µs")
    rows, figures = [], []
    total = 0.0
    for name, (plain, ours, number, units) in make_calls().items():
        best = {"torch": float("inf"), "lockstep": float("inf")}
        for turn in range(chosen.repeats):
            sides = [("torch", plain), ("lockstep", ours)]
            for side, call in sides if turn % 2 else reversed(sides):
                best[side] = min(best[side], time_us(call, number) / units)
        extra = best["lockstep"] - best["torch"]
        total += extra
        rows.append([name, f"{best['torch']:.1f}", f"{best['lockstep']:.1f}", f"{extra:.1f}"])
        figures.append(
            {"call": name, "torch_us": best["torch"], "lockstep_us": best["lockstep"], "extra_us": extra}
        )
    rows.append(["a step", "", "", f"{total:.1f}"])
    figures.append({"call": "a step", "extra_us": total})
    report.finish(
        ["call", "torch", "lockstep", "extra"],
        rows,
        figures,
        {"repeats": chosen.repeats, "threads": 1, "task": "digits"},
        chosen.output,
        ["The fastest of the repeats. 'a step' is the sum of the differences."],
    )


if __name__ == "__main__":
    main()
