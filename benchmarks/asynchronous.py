"""Convergence and bytes of synchronous training, local SGD, DiLoCo and bounded staleness, for the same samples.

    python benchmarks/asynchronous.py
    python benchmarks/asynchronous.py --quick

Two processes train the small GPT of examples/recipes/slow_links.py from the same weights on the same windows. Then two
processes of uneven speed show how often a rank waits under each bound of staleness: every fourth step takes one of them
longer than all others, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "docs" / "images" / "asynchronous.svg"
BOUNDS = (0, 1, 2, 4)
WAIT_STEPS, NAP_MS = 40, 60.0
PROCESSES = 2
COLORS = {"sync": "#1d3557", "local": "#e07a00", "diloco": "#2a9d8f", "stale": "#c1121f"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a sixth of the steps, and no picture")
    parser.add_argument(
        "--output", type=Path, help="JSON file (default benchmarks/results/asynchronous.json)"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(output: Path, quick: bool) -> None:
    """One rank: trains in every mode; rank 0 writes what it found."""
    import torch

    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    import slow_links as example

    from lockstep import PartialState

    torch.set_num_threads(1)
    text = example.corpus.load()
    setup = example.Options()
    if quick:
        setup = replace(setup, steps=40)
    found: dict[str, Any] = {"settings": asdict(setup), "modes": {}, "waits": []}
    for mode in example.MODES:
        result = example.train(mode, setup, *text)
        found["modes"][mode] = {
            "losses": result.losses,
            "bytes_sent": result.bytes_sent,
            "staleness": None if result.report is None else staleness_of(result.report),
        }
    tiny = example.GPTConfig(width=32, layers=1)
    uneven = replace(setup, steps=WAIT_STEPS, every=WAIT_STEPS, batch_size=2, slow_ms=NAP_MS, config=tiny)
    for bound in BOUNDS:
        result = example.train("stale", replace(uneven, staleness=bound), *text)
        found["waits"].append({"bound": bound, **staleness_of(result.report)})
    state = PartialState(cpu=True)
    if state.is_main_process:
        output.write_text(json.dumps(found))
    state.wait_for_everyone()


def staleness_of(report: Any) -> dict[str, Any]:
    return {
        "maximum": report.maximum,
        "mean": report.mean,
        "histogram": dict(report.histogram),
        "waits": report.waits,
    }


def picture(curves: dict[str, list[tuple[int, float]]], labels: dict[str, str]) -> str:
    """The curves as SVG: windows seen to the right, loss upwards."""
    width, height, left, right, top, bottom = 680, 360, 60, 30, 44, 50
    points = [point for curve in curves.values() for point in curve]
    most = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + (width - left - right) * x / most
        return across, top + (height - top - bottom) * (high - y) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13" fill="#222">',
        "<title>Validation loss of synchronous and asynchronous training for the same samples</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="16" y="26" font-weight="bold">Validation loss, nats per byte</text>',
    ]
    for i in range(5):
        value = low + (high - low) * i / 4
        x, y = at(0, value)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        x, y = at(most * i / 4, low)
        parts.append(f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{most * i // 4}</text>')
    parts.append(
        f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">windows of 64 bytes seen</text>'
    )
    for i, (name, curve) in enumerate(curves.items()):
        line = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in curve)
        color = COLORS[name]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        y = top + 18 + 20 * i
        parts.append(f'<path d="M{width - 300} {y - 4}h24" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{width - 268}" y="{y}">{labels[name]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    chosen = options()
    if chosen.worker is not None:
        worker(chosen.worker, chosen.quick)
        return
    report = common.Report("asynchronous", "The same samples, two processes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        quick = ["--quick"] if chosen.quick else []
        common.run_workers(__file__, [*quick, "--worker", str(path)], PROCESSES)
        found = json.loads(path.read_text())
    settings, modes = found["settings"], found["modes"]
    every, bound = settings["every"], settings["staleness"]
    labels = {
        "sync": "synchronous",
        "local": f"local SGD, mean every {every} steps",
        "diloco": f"DiLoCo, outer step every {every}",
        "stale": f"staleness up to {bound}",
    }
    rows = []
    for mode, one in modes.items():
        share = one["bytes_sent"] / modes["sync"]["bytes_sent"]
        losses = [loss for _, loss in one["losses"]]
        stale = one["staleness"]
        rows.append(
            [
                labels[mode],
                *(f"{losses[len(losses) * i // 4 - 1]:.3f}" for i in (1, 2, 3, 4)),
                f"{one['bytes_sent'] / 1e6:.2f}",
                f"{share:.3f}",
                "" if stale is None else f"{stale['maximum']} / {stale['mean']:.2f}",
            ]
        )
    for one in found["waits"]:
        rows.append(
            [
                f"uneven ranks, staleness up to {one['bound']}: {one['waits']} waits in {WAIT_STEPS} updates",
                *[""] * 6,
                f"{one['maximum']} / {one['mean']:.2f}",
            ]
        )
    columns = ["", "loss at 1/4", "1/2", "3/4", "end", "MB sent", "of synchronous", "staleness, max / mean"]
    notes = [
        "Losses are of validation windows. Bytes are those of a ring, or point to point, sent by rank 0.",
        f"Uneven: each rank naps {NAP_MS:.0f} ms at every fourth step, not at the same ones.",
    ]
    report.finish(columns, rows, {"modes": modes, "waits": found["waits"]}, settings, chosen.output, notes)
    if not chosen.quick:
        curves = {mode: one["losses"] for mode, one in modes.items()}
        IMAGE.write_text(picture(curves, labels), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
