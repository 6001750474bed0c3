"""What faster forms of the optimizer and of clipping gain on this machine, and whether they change the numbers.

    python benchmarks/defaults.py
    python benchmarks/defaults.py --quick

One process of one thread; the demo's GPT with 3.2 million parameters, and one with many small layers. The forms take
turns on the same gradients; a ratio compares two of one round.
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


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    report = common.Report("defaults", "Forms of the optimizer and of clipping, CPU time of a call")
    figures, rows = [], []
    for what in FORMS:
        for label, task in MODELS.items():
            found = measure(what, task, chosen.rounds)
            for name, one in found.items():
                taken = common.summary(one["us"])
                ratio = common.summary(common.ratios(one["us"], found[DEFAULT]["us"]))
                figures.append(
                    {
                        "call": what,
                        "model": label,
                        "form": name,
                        "cpu_us": taken.to_dict(),
                        "over_default": ratio.to_dict(),
                        "largest_difference": one["apart"],
                    }
                )
                rows.append([what, label, name, taken.show(0), ratio.show(), f"{one['apart']:.0e}"])
    columns = ["call", "model", "form", "µs", "over the default", "numbers differ by"]
    report.finish(columns, rows, figures, {"rounds": chosen.rounds}, chosen.output)


if __name__ == "__main__":
    main()
