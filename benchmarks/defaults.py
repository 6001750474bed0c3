"""What faster forms of the optimizer, of clipping and of copies to a GPU gain, and whether they change the numbers.

    python benchmarks/defaults.py
    python benchmarks/defaults.py --quick

One process of one thread; the demo's GPT with 3.2 million parameters, and one with many small layers. The forms take
turns on the same gradients; a ratio compares two of one round. Copies of a batch need a CUDA device: their time is that
of a loop in which the device computes between two batches.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import common
from lockstep.data import batch_mover
from zero_contenders import ZeroTask

MODELS = {
    "GPT, 3.2 M": ZeroTask(stage=0, width=256, layers=4),
    "GPT, 24 narrow layers": ZeroTask(stage=0, width=32, layers=24),
}
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "AdamW": {"torch's default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}},
    "clip_grad_norm_": {
        "torch's default": {},
        "foreach": {"foreach": True},
        "one by one": {"foreach": False},
    },
}
DEFAULT = "torch's default"
COPIES = {DEFAULT: False, "pinned memory": True}
"""How batches are copied: whether through pinned memory."""
IMAGES = (64, 3, 224, 224)
COPY = ("copy of a batch", "64 images of 224²")
BATCHES = 20


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 40")
    parser.add_argument("--rounds", type=int, help="calls of each form (default 40, quick 5)")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/defaults.json)")
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (5 if chosen.quick else 40)
    return chosen


def fill_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def caller(what: str, model: nn.Module, form: dict[str, Any]) -> Callable[[], object]:
    if what == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, **form).step
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, **form)


def differences(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of a weight or gradient."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(
        float((mine - theirs).abs().max())
        for one, two in pairs
        for mine, theirs in ((one.detach(), two.detach()), (one.grad, two.grad))
        if mine is not None and theirs is not None
    )


def measure(what: str, task: ZeroTask, rounds: int) -> dict[str, dict[str, Any]]:
    """Of each form: CPU time in µs of each round, and how far its numbers are from those of torch's default."""
    forms = FORMS[what]
    first = task.model()
    models = {name: copy.deepcopy(first) for name in forms}
    calls = {name: caller(what, models[name], form) for name, form in forms.items()}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(rounds + 1):
        for name in list(forms)[:: 1 if turn % 2 == 0 else -1]:
            fill_gradients(models[name], turn)
            start = time.process_time()
            calls[name]()
            times[name].append((time.process_time() - start) * 1e6)
    return {
        name: {"us": times[name][1:], "apart": differences(models[name], models[DEFAULT])} for name in forms
    }


def measure_copies(rounds: int) -> dict[str, dict[str, Any]]:
    """Of each form: µs of wall-clock for a batch in each round, and how far the copies are from the batch."""
    device = torch.device("cuda")
    batch = [torch.randn(IMAGES), torch.zeros(IMAGES[0], dtype=torch.int64)]
    matrix = torch.randn(4096, 4096, device=device)
    movers = {name: batch_mover(device, False, pins, rank=0) for name, pins in COPIES.items()}
    times: dict[str, list[float]] = {name: [] for name in COPIES}
    apart = dict.fromkeys(COPIES, 0.0)
    for turn in range(rounds + 1):
        for name in list(COPIES)[:: 1 if turn % 2 == 0 else -1]:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BATCHES):
                moved = movers[name](batch)
                for _ in range(4):
                    torch.mm(matrix, matrix)
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e6 / BATCHES)
            apart[name] = max(apart[name], float((moved[0].cpu() - batch[0]).abs().max()))
    return {name: {"us": times[name][1:], "apart": apart[name]} for name in COPIES}


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    report = common.Report("defaults", "Forms of the optimizer, of clipping and of copies to a GPU")
    figures: list[dict[str, Any]] = []
    rows = []
    cells = [(what, label) for what in FORMS for label in MODELS]
    found = {(what, label): measure(what, MODELS[label], chosen.rounds) for what, label in cells}
    if torch.cuda.is_available():
        found[COPY] = measure_copies(chosen.rounds)
    for (what, label), forms in found.items():
        for name, one in forms.items():
            taken = common.summary(one["us"])
            ratio = common.summary(common.ratios(one["us"], forms[DEFAULT]["us"]))
            figures.append(
                {
                    "call": what,
                    "model": label,
                    "form": name,
                    "wall_us" if (what, label) == COPY else "cpu_us": taken.to_dict(),
                    "over_default": ratio.to_dict(),
                    "largest_difference": one["apart"],
                }
            )
            rows.append([what, label, name, taken.show(0), ratio.show(), f"{one['apart']:.0e}"])
    if COPY not in found:
        rows += [[*COPY, name, "needs a GPU", "", ""] for name in COPIES]
    columns = ["call", "model", "form", "µs", "over the default", "numbers differ by"]
    report.finish(columns, rows, figures, {"rounds": chosen.rounds}, chosen.output)


if __name__ == "__main__":
    main()
