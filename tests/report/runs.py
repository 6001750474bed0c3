"""Folders of runs that never were: long, crashed, running, restarted, hanging, spiking, torn, hostile.

``python -m tests.report.runs FOLDER`` writes one of each, for the eye.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

BEGIN = 1_790_000_000.0
"""When every run begins, in seconds since 1970."""
CONFIGURATION = [
    {"name": "mixed_precision", "value": "bf16", "source": "--mixed-precision"},
    {"name": "parallel", "value": "zero=2", "source": "config.yaml:4"},
    {"name": "gradient_accumulation_steps", "value": 1, "source": "default"},
    {"name": "learning_rate", "value": 3e-4, "source": "train.py"},
]


@dataclass(frozen=True)
class Start:
    """One start of a run: it makes the steps ``first`` to ``last`` on ``ranks`` ranks, and ends by ``ends`` (an event),
    or without a word. ``after``: seconds since the start before it was last seen."""

    first: int
    last: int
    ranks: int = 8
    ends: Mapping[str, Any] | None = None
    after: float = 45.0
    loaded: int | None = None


@dataclass(frozen=True)
class Synthetic:
    """What is written. ``spikes``: steps at which loss and gradient norm jump. ``slow_rank``: takes 1.4 times as long.
    ``slower``: how many times longer the last step takes than the first. ``events``: further lines."""

    starts: Sequence[Start] = (Start(1, 400, ends={"event": "end", "reason": "finished"}),)
    spikes: Sequence[int] = ()
    not_finite: Sequence[int] = ()
    slow_rank: int | None = None
    slower: float = 1.0
    data_wait: float = 0.04
    save_every: int = 100
    seed: int = 0
    learning_rate: float = 3e-4
    noise_from: int | None = None
    events: Sequence[Mapping[str, Any]] = ()
    configuration: Sequence[Mapping[str, Any]] = field(default_factory=lambda: list(CONFIGURATION))
    name: str = "train/accuracy"
    left_out: Sequence[str] = ()


def write_run(folder: Path, run: Synthetic) -> Path:
    """Write the folder; the same bytes for the same ``run``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    events: list[Mapping[str, Any]] = []
    clock = BEGIN
    for attempt, start in enumerate(run.starts):
        clock += start.after if attempt else 0.0
        events.append(_start_event(run, start, attempt, clock))
        clock += 21.0
        if start.loaded is not None:
            events.append(
                {
                    "event": "loaded", "time": clock - 4, "attempt": attempt, "step": start.loaded,
                    "path": f"checkpoints/checkpoint_{start.loaded}",
                    "epoch": start.loaded // 200, "samples_seen": start.loaded * 512,
                }
            )  # fmt: skip
        for line in _steps(run, start, attempt, clock):
            clock = line["time"]
            lines.append(
                json.dumps({name: value for name, value in line.items() if name not in run.left_out})
            )
            if line["step"] % run.save_every == 0:
                path = f"checkpoints/checkpoint_{line['step']}"
                events.append(
                    {
                        "event": "checkpoint", "time": clock, "attempt": attempt, "step": line["step"], "path": path,
                        "seconds": 2.5, "bytes": 1.6e9, "verified": True,
                        "kept": line["step"] % (10 * run.save_every) == 0,
                    }
                )  # fmt: skip
        if start.ends is not None:
            clock += 30.0 if start.ends["event"] in ("error", "hang") else 1.0
            events.append({"time": clock, "attempt": attempt, "step": start.last, **start.ends})
    events += run.events
    events.sort(key=lambda event: event.get("time", math.inf))
    (folder / "measures.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events), "utf-8")
    return folder


def _start_event(run: Synthetic, start: Start, attempt: int, time: float) -> dict[str, Any]:
    return {
        "event": "start", "time": time, "attempt": attempt,
        "world_size": start.ranks, "nodes": max(start.ranks // 8, 1),
        "device": "NVIDIA H100 80GB HBM3", "peak_flops": 989e12, "parallel": "zero=2", "parameters": 124_439_808,
        "versions": {"torch": "2.13.0", "lockstep": "1.0.0", "python": "3.11.7"}, "seed": 1234,
        "environment": {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "8", "hostname": "node-17"},
        "configuration": list(run.configuration),
        "parameter_dtypes": ["float32"], "optimizers": ["adamw"], "trainable_parameters": 124_439_808,
    }  # fmt: skip


def _steps(run: Synthetic, start: Start, attempt: int, clock: float) -> Iterable[dict[str, Any]]:
    numbers = np.arange(start.first, start.last + 1)
    count = len(numbers)
    last = max(one.last for one in run.starts)
    generator = np.random.default_rng([run.seed, attempt])
    noise = np.random.default_rng(run.seed).standard_normal(last + 1)[numbers]
    loss = 2.2 + 8.6 * np.exp(-numbers / (0.06 * last)) + 0.6 * np.exp(-numbers / (0.5 * last)) + 0.04 * noise
    norm = np.exp(0.2 * np.random.default_rng(run.seed + 1).standard_normal(last + 1)[numbers]) * (
        0.35 + 3 * np.exp(-numbers / (0.03 * last))
    )
    if run.noise_from is not None:
        later = numbers >= run.noise_from
        loss = loss + later * 1e-4 * np.random.default_rng(99).standard_normal(count)
    for spike in run.spikes:
        near = numbers == spike
        loss, norm = loss + 4.0 * near, norm * (1 + 60 * near)
    warm = np.minimum(numbers / (0.02 * last), 1)
    rate = run.learning_rate * warm * (0.1 + 0.9 * 0.5 * (1 + np.cos(math.pi * numbers / last)))
    slower = 1 + (run.slower - 1) * numbers / last
    jitter = 1 + 0.03 * np.abs(generator.standard_normal(count))
    scale = 8 / start.ranks
    parts = {
        "data": run.data_wait * np.where(generator.random(count) < 0.01, 8, 1) * slower,
        "to_device": np.full(count, 0.002),
        "forward": 0.082 * jitter * scale,
        "backward": 0.161 * jitter * scale,
        "communication": 0.021 * jitter,
        "optimizer": np.full(count, 0.011),
        "save": np.where(numbers % run.save_every == 0, 2.5, 0.0),
        "wait": 0.006 * jitter,
        "other": np.full(count, 0.003),
    }
    total = np.sum(list(parts.values()), axis=0)
    time = clock + np.cumsum(total)
    own = total - parts["wait"] - parts["communication"]
    for place, step in enumerate(numbers.tolist()):
        ranks = [
            round(float(own[place] * (1.4 if rank == run.slow_rank else 1.0)), 6)
            for rank in range(start.ranks)
        ]
        line: dict[str, Any] = {
            "step": step, "time": round(float(time[place]), 6), "attempt": attempt, "epoch": step // 200,
            "samples": 512, "tokens": 524_288, "loss": float(loss[place]), "gradient_norm": float(norm[place]),
            "learning_rate": [float(rate[place])],
            "seconds": {"total": round(float(total[place]), 6)}
            | {name: round(float(values[place]), 6) for name, values in parts.items()},
            "flops": {"model": 4.2e14, "hardware": 4.9e14},
            "rank_seconds": ranks,
        }  # fmt: skip
        if step in run.not_finite:
            line["loss"] = math.nan
        if place == 0 or step % 1000 == 0:
            line["memory"] = {"peak": 9.6e9 + 4e8 * min(step / 20_000, 1)}
        if step % 50 == 0:
            line["logged"] = {run.name: 0.9 - 0.8 * math.exp(-step / (0.2 * last))}
        yield line


END = {"event": "end", "reason": "the script ended"}
ERROR = {
    "event": "error", "rank": 3,
    "sentence": "RuntimeError: CUDA error: uncorrectable ECC error encountered (train.py:88 in backward).",
}  # fmt: skip
HANG = {
    "event": "hang", "rank": 5,
    "sentence": "rank 5 never joined all_reduce #412 that rank 0 entered at train.py:57; rank 5 is at data.py:88 in "
    "slow_fetch.",
}  # fmt: skip
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e&amp;\x00'


def spike(step: int, at: float, action: str = "skip", attempt: int = 0) -> dict[str, Any]:
    return {
        "event": "spike", "time": BEGIN + at, "attempt": attempt, "step": step, "kind": "loss", "value": 6.4,
        "score": 23.1, "action": action, "skipped": list(range(step, step + 3)) if action == "rollback" else [step],
    }  # fmt: skip


LONG = Synthetic(
    starts=(Start(1, 20_000, ends=END),),
    spikes=(5_000, 12_345),
    save_every=2000,
    events=(spike(5_000, 1700.0),),
)
CRASHED = Synthetic(starts=(Start(1, 620, ends=ERROR),), save_every=250, data_wait=0.004)
RUNNING = Synthetic(starts=(Start(1, 350),), slow_rank=5)
RESTARTED = Synthetic(
    starts=(
        Start(1, 620, 16, ends=HANG),
        Start(501, 1130, 16, ends=ERROR, loaded=500),
        Start(1001, 2000, 8, ends=END, after=1900.0, loaded=1000),
    ),
    save_every=250,
    spikes=(730,),
    events=(
        spike(730, 320.0, "rollback", 1),
        {"event": "slow", "time": BEGIN + 110, "attempt": 0, "rank": 11,
         "sentence": "rank 11 takes 1.4 times as long."},
        {"event": "restart", "time": BEGIN + 234, "attempt": 1, "reason": "rank 5 hung", "world_size": 16},
        {"event": "damage", "time": BEGIN + 350, "attempt": 1, "step": 900,
         "sentence": "Parameter 'layers.1.up.weight' differs at step 900: rank 2 from ranks 0, 1, 3."},
    ),
)  # fmt: skip
HOSTILE_RUN = replace(
    Synthetic(),
    name=HOSTILE,
    configuration=[
        {"name": HOSTILE, "value": HOSTILE, "source": HOSTILE},
        {"name": "long", "value": "x" * 100_000, "source": {}},
    ],
    events=tuple(
        {
            "event": name, "time": BEGIN + 60 + place, "attempt": 0, "step": 10, "sentence": HOSTILE, "reason": HOSTILE,
            "path": HOSTILE, "action": HOSTILE, "kind": HOSTILE, "skipped": [HOSTILE], "rank": HOSTILE,
            "device": HOSTILE, "environment": {HOSTILE: HOSTILE},
            "versions": {HOSTILE: HOSTILE}, "optimizers": [HOSTILE],
        }
        for place, name in enumerate(
            ("checkpoint", "loaded", "hang", "damage", "slow", "spike", "capsule", "restart", HOSTILE)
        )
    ),
)  # fmt: skip
RUNS = {"long": LONG, "crashed": CRASHED, "running": RUNNING, "restarted": RESTARTED, "hostile": HOSTILE_RUN}


if __name__ == "__main__":
    for run_name, synthetic in RUNS.items():
        write_run(Path(sys.argv[1]) / run_name, synthetic)
