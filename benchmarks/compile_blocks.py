"""What ``compile=blocks`` costs at the first step and gains at the later ones, beside the whole model compiled at once.

    python benchmarks/compile_blocks.py
    python benchmarks/compile_blocks.py --quick

The demo's GPT, trained by one process. Each run has processes of its own: the first one with an empty cache of compiled
code, the second one with the cache that the first one left, as after a restart. The first step ends when its loss is
known; it includes compiling. The ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import common
from contenders import loss_of
from lockstep import Accelerator
from zero_contenders import ZeroTask

PLAIN = "not compiled"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "the whole": {"dynamo_backend": "inductor"},
    "compile=blocks": {"parallel": "compile=blocks"},
}
MEASURES = ("first_step_s", "restarted_first_step_s", "step_ms")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1 round instead of 5")
    parser.add_argument("--rounds", type=int, help="runs of each way (default 5, quick 1)")
    parser.add_argument("--width", type=int, default=192, help="features of a token (default %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="blocks (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default %(default)s)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--output", type=Path, help="JSON file (default benchmarks/results/compile_blocks.json)"
    )
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (1 if chosen.quick else 5)
    return chosen


def train(chosen: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the first step, milliseconds of a later one, and the losses."""
    torch.set_num_threads(1)
    task = ZeroTask(stage=0, width=chosen.width, layers=chosen.layers)
    model = task.model()
    accelerator = Accelerator(cpu=True, **WAYS[chosen.way])
    model, optimizer = accelerator.prepare(model, task.optimizer(model))
    windows = task.windows(0, 1)
    times, losses = [], []
    for _ in range(chosen.steps + 2):  # the first one compiles, and the second one is still slow
        ((inputs, targets),) = next(windows)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    return {
        "first_step_s": times[0],
        "step_ms": common.summary(times[2:]).median * 1e3,
        "losses": losses,
    }


def start(way: str, chosen: argparse.Namespace, cache: str) -> dict[str, Any]:
    """What a process of its own found, with this cache of compiled code.

    Raises:
        SystemExit: the process failed.
    """
    sizes = common.arguments_of(chosen, "width", "layers", "steps")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, __file__, f"--way={way}", *sizes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{way} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(way: str, chosen: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        first, second = start(way, chosen, cache), start(way, chosen, cache)
    return {**first, "restarted_first_step_s": second["first_step_s"]}


def main() -> None:
    chosen = options()
    if chosen.way:
        print(json.dumps(train(chosen)))
        return
    report = common.Report("compile_blocks", f"compile=blocks: a GPT with {chosen.layers} blocks")
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(chosen.rounds):
        for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
            runs[way].append(run(way, chosen))
    plain = runs[PLAIN]
    apart = {
        way: max(
            abs(a - b) / b
            for one, other in zip(those, plain, strict=True)
            for a, b in zip(one["losses"], other["losses"], strict=True)
        )
        for way, those in runs.items()
    }
    figures, rows = [], []
    for way, those in runs.items():
        seen = {name: common.summary([one[name] for one in those]) for name in MEASURES}
        ratio = common.summary(
            common.ratios([one["step_ms"] for one in those], [one["step_ms"] for one in plain])
        )
        figures.append(
            {
                "way": way,
                **{name: values.to_dict() for name, values in seen.items()},
                "step_over_plain": ratio.to_dict(),
                "largest_relative_difference_of_a_loss": apart[way],
            }
        )
        shown = [seen[name].show(1) for name in MEASURES]
        rows.append([way, *shown, ratio.show(), f"{apart[way]:.0e}"])
    report.finish(
        [
            "",
            "first step, s",
            "after a restart, s",
            "later step, ms",
            "over not compiled",
            "losses differ by",
        ],
        rows,
        figures,
        {name: getattr(chosen, name) for name in ("rounds", "width", "layers", "steps")},
        chosen.output,
    )


if __name__ == "__main__":
    main()
