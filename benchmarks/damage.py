"""What the checks for silent damage cost, on a small and on a larger GPT.

    python benchmarks/damage.py               # 2 processes
    python benchmarks/damage.py --quick

Trainings take turns in blocks of steps, in the same processes: without checks (twice), comparing parameters after each
step, and looking at gradients before each step. Each block has a block without checks next to it, before and after it
in turn. What one comparison costs is the difference; every 100 steps it costs a hundredth of that a step. Shown is CPU
time, which other work on the machine disturbs less than wall-clock, and which does not see waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

EVERY = 100
MODELS = {"small": {"width": 128, "layers": 2}, "larger": {"width": 256, "layers": 6}}
CHECKS: dict[str, dict[str, Any]] = {
    "none": {},
    "none again": {},  # its distance from none is what the machine cannot tell apart
    "divergence": {"divergence_every": 1},
    "gradients": {"bad_gradients": "skip"},
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="world size (default 2)")
    parser.add_argument(
        "--rows", type=int, default=16, help="sequences of 64 bytes in a step of each process"
    )
    return common.parse_for_blocks(parser, "damage", rounds=20, quick_rounds=2)


def training(model_name: str, checks: dict[str, Any], chosen: argparse.Namespace) -> Iterator[None]:
    """Endless; yields after every step."""
    import torch
    import torch.nn.functional as F

    from contenders import SmallGPT
    from lockstep import Accelerator, DamageChecks

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DamageChecks(**checks)])
    torch.manual_seed(0)
    model = SmallGPT(**MODELS[model_name])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.randint(0, 256, (chosen.rows, 65), device=accelerator.device)
    while True:
        logits = model(tokens[:, :-1])
        accelerator.backward(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad()
        yield


def time_block(loop: Iterator[None], steps: int) -> float:
    """CPU time of this process in a step: the median of a block, in ms, after a step for the caches."""
    next(loop)
    return common.time_steps(loop, steps)[0]["cpu_ms"]


def worker(chosen: argparse.Namespace) -> None:
    """One rank: takes the turns; rank 0 writes the pairs of (with a check, without), in ms a step."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for model_name in MODELS:
        loops = {name: training(model_name, checks, chosen) for name, checks in CHECKS.items()}
        for loop in loops.values():
            for _ in range(5):
                next(loop)
        pairs = found.setdefault(model_name, {name: [] for name in CHECKS if name != "none"})
        for turn in range(chosen.rounds):
            for name, taken in pairs.items():
                sides = ["none", name] if turn % 2 else [name, "none"]
                block = {side: time_block(loops[side], chosen.steps) for side in sides}
                taken.append((block[name], block["none"]))
    if int(os.environ.get("RANK", "0")) == 0:
        chosen.worker.write_text(json.dumps(found))


def main() -> None:
    chosen = options()
    if chosen.worker is not None:
        worker(chosen)
        return
    report = common.Report("damage", f"Checks for silent damage, CPU time, {chosen.processes} process(es)")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        common.run_workers(__file__, [*sys.argv[1:], "--worker", str(path)], chosen.processes)
        found = json.loads(path.read_text())
    rows, figures = [], []
    for model_name, checks in found.items():
        for name, pairs in checks.items():
            step = common.summary([plain for _, plain in pairs])
            extra = common.summary([checked - plain for checked, plain in pairs])
            each = EVERY if name == "divergence" else 1
            share = extra.median / each / step.median
            rows.append([model_name, name, step.show(2), extra.show(2), str(each), f"{share:.2%}"])
            figures.append(
                {
                    "model": model_name,
                    "check": name,
                    "step_ms": step.to_dict(),
                    "check_ms": extra.to_dict(),
                    "every": each,
                    "share_of_a_step": float(f"{share:.3g}"),
                }
            )
    settings = {"rounds": chosen.rounds, "steps": chosen.steps, "rows": chosen.rows}
    report.finish(
        ["model", "check", "step, ms", "one check, ms", "every", "of a step"],
        rows,
        figures,
        settings,
        chosen.output,
    )


if __name__ == "__main__":
    main()
