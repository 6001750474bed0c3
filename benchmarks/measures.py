"""What measures cost: processor time of the main thread in a step, and how well they agree with what is known.

A step's seams are called as a training loop calls them, many times, with measures and without; the difference is what
measures take. Hooks of torch that lead to them are not in it (about 2 µs). Processor time is counted, which a busy
machine disturbs little.

    python benchmarks/measures.py
    python benchmarks/measures.py --quick
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch

import common
from lockstep import Accelerator
from lockstep.runtime import StepClock

STEP_S = 0.03
CALLS = 3000


class Seams:
    """What a training loop calls of measures in a step: loader, model, backward, clipping, optimizer."""

    def __init__(self, run_dir: str, measured: bool) -> None:
        self.accelerator = Accelerator(run_dir=run_dir, watch=False)
        model: Any = torch.nn.Linear(4, 1)
        model, optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):  # what is counted once is over
            self.accelerator.backward(model(torch.randn(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
        self.model, self.measures = model, self.accelerator.measures
        self.clock = self.accelerator.gradient_state.clock
        self.loss, self.norm = torch.tensor(1.0), torch.tensor(1.0)
        self.batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "labels": torch.zeros(2, 4)}
        self.keywords = {**self.batch, "attention_mask": torch.ones(2, 4)}
        self.measured = measured
        if not measured:
            self.measures.finish("end_training")
            self.clock = StepClock()  # that nobody looks at

    def step(self) -> None:
        clock, measures = self.clock, self.measures
        clock.batch_wanted()
        clock.enter("to_device")
        clock.batch_comes(self.batch)
        if self.measured:
            measures.call_begins(self.model, (), self.keywords)
            measures.call_ends()
        clock.backward_begins()
        if self.measured:
            measures.backward_begins(self.loss, None)
            measures.backward_ends(True)
        clock.enter("optimizer")
        clock.enter("other")
        if self.measured:
            measures.clipped(self.norm)
        clock.enter("optimizer")
        clock.stepped()
        clock.enter("other")
        clock.enter("optimizer")
        clock.enter("other")

    def time_us(self) -> tuple[float, float]:
        """µs of processor time for a step: of the main thread, and with what its thread writes afterwards."""
        began = time.process_time(), time.thread_time()
        for _ in range(CALLS):
            self.step()
        own = time.thread_time() - began[1]
        if self.measured:
            writer = self.measures._writer
            if writer is not None:
                writer.folder.flush()
        return 1e6 * own / CALLS, 1e6 * (time.process_time() - began[0]) / CALLS


def overhead(rounds: int) -> dict[str, Any]:
    """With measures in memory, and with lines that are written, each less the same calls without measures."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Seams("no", measured=False)
        found: dict[str, Any] = {"rounds": rounds, "calls": CALLS}
        for name, run_dir in (("in memory", "no"), ("written", f"{folder}/run")):
            seams = Seams(run_dir, measured=True)
            pairs = []
            for _ in range(rounds):
                without = plain.time_us()
                pairs.append((without, seams.time_us()))
            main = common.summary([measured[0] - without[0] for without, measured in pairs])
            process = common.summary([measured[1] - without[1] for without, measured in pairs])
            found[name] = {"main_thread_us": main.to_dict(), "all_threads_us": process.to_dict()}
            found[name]["share_of_a_30_ms_step"] = float(f"{1e-6 * main.median / STEP_S:.3g}")
            seams.accelerator.end_training()
    return found


def products() -> dict[str, Any]:
    """MFU of a loop of known products, against operations and seconds that are measured around it."""
    size, rows, steps = 1024, 1024, 30
    accelerator = Accelerator(run_dir="no", watch=False)

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(size, size) / size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    model: Any = Product()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.randn(rows, size)
    began = 0.0
    for number in range(steps + 3):
        if number == 3:
            began = time.perf_counter()
            accelerator.measures._ended.recent.clear()
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    accelerator.end_training()
    known = 2 * 2 * rows * size * size * steps / seconds  # forward, and the weight's gradient
    peak = accelerator.measures.peak_flops
    assert peak is not None
    mfu = accelerator.measures.mfu
    assert mfu is not None
    return {
        "known_mfu": round(known / peak, 4),
        "mfu": round(mfu, 4),
        "ratio": round(mfu / (known / peak), 4),
        "peak_tflops": round(peak / 1e12, 4),
    }


def main() -> None:
    trials = common.Trials("rounds", "rounds", count=9, quick=2)
    chosen = common.parse_for_trials(str(__doc__), "measures", trials)
    report = common.Report("measures", "What measures cost in a step, CPU time of one process")
    torch.set_num_threads(1)
    cost, product = overhead(chosen.rounds), products()
    rows = [
        *(
            [f"{name}: {what}, µs a step", f"{cost[name][key]['median']:.1f}"]
            for name in ("in memory", "written")
            for what, key in (("main thread", "main_thread_us"), ("all threads", "all_threads_us"))
        ),
        ["written: of a step of 30 ms", f"{cost['written']['share_of_a_30_ms_step']:.3%}"],
        ["MFU of known products, measured around the loop", f"{product['known_mfu']:.3f}"],
        ["MFU that the measures say", f"{product['mfu']:.3f}"],
    ]
    figures = {"overhead": cost, "products": product}
    report.finish(["", "found"], rows, figures, {"rounds": chosen.rounds, "calls": CALLS}, chosen.output)


if __name__ == "__main__":
    main()
