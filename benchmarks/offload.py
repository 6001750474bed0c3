"""Training with the optimizer, or everything, on disk: the same bits, and how long a step takes.

    python benchmarks/offload.py
    python benchmarks/offload.py --quick

On a CPU: steps of one model through Accelerator with each `offload`, in turns with the two bounds of such a step. One
is computing alone: the plain loop, with torch's fused AdamW and everything in memory. The other is moving alone: as
many bytes as a step has moved to and from the disk (the system counts them), in blocks, past the page cache, by one
thread that reads and one that writes. Gradients are clipped. After the last step the parameters are compared bit for
bit.

Beside the times stands what the main thread did in a step: how long it computed, and how long it waited for a step, a
read or a write. The rest of a step is the time in which other processes had the processor.

With a GPU: `offload=optimizer` on the device's model beside DeepSpeed's ZeRO-Offload (stage 2, if it is installed), and
the share of the host link's bandwidth: 4 bytes a parameter and step (2 down, 2 up with 16-bit numbers; 8 in fp32).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import common

WIDTH = 1024
PARAMETERS_OF_A_BLOCK = 8 * WIDTH * WIDTH
SETTINGS = (
    "offload=optimizer",
    "offload=optimizer offload_to={}",
    "offload=params offload_to={}",
    "offload=all offload_to={}",
)
MAX_NORM = 1e-5  # below the norm of every step: all gradients are scaled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + hidden


def build(blocks: int, device: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)]).to(device)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 blocks and 3 steps")
    parser.add_argument("--steps", type=int, help="measured steps of each setting (6)")
    parser.add_argument("--blocks", type=int, help="blocks of 8.4 M parameters (8)")
    parser.add_argument("--rows", type=int, default=512, help="rows of a batch (512)")
    parser.add_argument("--folder", type=Path, help="where files go (default: a temporary directory)")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/offload.json)")
    chosen = parser.parse_args()
    chosen.steps = chosen.steps or (3 if chosen.quick else 6)
    chosen.blocks = chosen.blocks or (2 if chosen.quick else 8)
    return chosen


class Loop:
    """One contender: a model and an optimizer, and a step that the caller times.

    Args:
        parallel: Of Accelerator; None: the plain loop.
    """

    def __init__(self, blocks: int, parallel: str | None) -> None:
        self.model: Any = build(blocks)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
        self.clip: Callable[..., Any] = torch.nn.utils.clip_grad_norm_
        if parallel is not None:
            from lockstep import Accelerator

            accelerator = Accelerator(cpu=True, parallel=parallel)
            self.model, self.optimizer = accelerator.prepare(self.model, self.optimizer)
            self.backward, self.clip = accelerator.backward, accelerator.clip_grad_norm_

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.backward(self.model(x).square().mean())
        norm = self.clip(self.model.parameters(), MAX_NORM)
        assert float(norm) > MAX_NORM
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.model.state_dict().values()]


def seconds_of_steps(loop: Loop, batches: list[torch.Tensor]) -> float:
    """A step's time in a row of steps: what a step leaves to the next one is in there."""
    start = time.perf_counter()
    for x in batches:
        loop.step(x)
    loop.model.state_dict()  # until the last step is done
    return (time.perf_counter() - start) / len(batches)


def moved_bytes() -> tuple[int, int]:
    """(read, written) from and to disks by this process so far, as the system counts them; zeros if it does not."""
    try:
        with open("/proc/self/io") as lines:
            counts = {name: int(value) for name, value in (line.split(":") for line in lines)}
    except OSError:
        return 0, 0
    return counts["read_bytes"], counts["write_bytes"]


def main_thread_seconds() -> tuple[float, float]:
    """(computing, ready to compute while others did) of the main thread so far."""
    with open(f"/proc/self/task/{os.getpid()}/schedstat") as file:
        computed, queued, _ = file.read().split()
    return int(computed) / 1e9, int(queued) / 1e9


class Transfers:
    """What a step has read and written, without computing: blocks through one buffer each way."""

    def __init__(self, blocks: int, moved: tuple[int, int], folder: str) -> None:
        from lockstep.offload.files import ALIGNMENT, OffloadFile, aligned_buffer

        nbytes = PARAMETERS_OF_A_BLOCK * 4
        whole = (-(-count // ALIGNMENT) * ALIGNMENT for count in moved)
        self.moved = dict(zip(("read", "write"), whole, strict=True))
        self.file = OffloadFile(folder, blocks * nbytes)
        self.offsets = [self.file.place(nbytes) for _ in range(blocks)]
        self.buffers = {what: aligned_buffer(nbytes).zero_() for what in self.moved}
        for offset in self.offsets:
            self.file.write(offset, self.buffers["write"])

    def seconds(self) -> float:
        start = time.perf_counter()
        threads = [threading.Thread(target=self._move, args=(what,)) for what in self.moved]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def _move(self, what: str) -> None:
        left, offsets = self.moved[what], itertools.cycle(self.offsets)
        while left:
            buffer = self.buffers[what][:left]
            getattr(self.file, what)(next(offsets), buffer)
            left -= buffer.numel()


class Contest:
    """One ``offload`` beside the plain loop, in turns.

    ``taken``: seconds a step of each, by round. ``moved``: bytes that a step of ours reads and writes.
    """

    def __init__(self, chosen: argparse.Namespace, parallel: str, folder: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(chosen.rows, WIDTH, generator=generator) for _ in range(3)]
        self.plain, self.ours = Loop(chosen.blocks, None), Loop(chosen.blocks, parallel.format(folder))
        self.taken: dict[str, list[float]] = defaultdict(list)
        for loop in (self.plain, self.plain, self.ours):
            seconds_of_steps(loop, self.batches)
        before = moved_bytes()
        seconds_of_steps(self.ours, self.batches)
        moved = [(after - b) // len(self.batches) for after, b in zip(moved_bytes(), before, strict=True)]
        self.moved = (moved[0], moved[1]) if "offload_to" in parallel else (0, 0)
        self.transfers = Transfers(chosen.blocks, self.moved, folder) if any(self.moved) else None

    def round(self) -> None:
        self.taken["computing alone"].append(seconds_of_steps(self.plain, self.batches))
        before = main_thread_seconds()
        seconds = seconds_of_steps(self.ours, self.batches)
        computed, queued = (
            (after - b) / len(self.batches) for after, b in zip(main_thread_seconds(), before, strict=True)
        )
        self.taken["offloaded"].append(seconds)
        self.taken["main thread computes"].append(computed)
        self.taken["main thread waits"].append(max(0.0, seconds - computed - queued))
        self.taken["moving alone"].append(self.transfers.seconds() if self.transfers is not None else 0.0)

    def figures(self) -> dict[str, Any]:
        if not all(map(torch.equal, self.plain.weights(), self.ours.weights())):
            raise SystemExit("the parameters differ from those of the plain loop")
        bounds = [
            max(pair) for pair in zip(self.taken["computing alone"], self.taken["moving alone"], strict=True)
        ]
        summaries = {name: common.summary(values).to_dict() for name, values in self.taken.items()}
        return {
            "over the longer bound": common.summary(common.ratios(self.taken["offloaded"], bounds)).to_dict(),
            "bound": common.summary(bounds).to_dict(),
            "bytes read in a step": self.moved[0],
            "bytes written in a step": self.moved[1],
            "bit_identical": True,
        } | summaries


COLUMNS = ("computing alone", "moving alone", "offloaded", "main thread computes", "main thread waits")


def on_cpu(chosen: argparse.Namespace, folder: str) -> tuple[list[list[str]], list[dict[str, Any]]]:
    rows, figures = [], []
    for setting in SETTINGS:
        contest = Contest(chosen, setting, folder)
        for _ in range(chosen.steps):
            contest.round()
        figure = contest.figures()
        moved, seconds = sum(contest.moved), figure["moving alone"]["median"]
        bandwidth = f"{moved / seconds / 1e9:.2f}" if seconds else ""
        ratio = figure["over the longer bound"]
        rows.append(
            [
                setting.format("PATH"),
                *(f"{figure[name]['median']:.3f}" for name in COLUMNS),
                f"{moved / 1e9:.2f}",
                bandwidth,
                f"{ratio['median']:.2f}  ({ratio['q1']:.2f} to {ratio['q3']:.2f})",
            ]
        )
        figures.append({"parallel": setting.format("PATH")} | figure)
        del contest
    return rows, figures


# -- with a GPU -------------------------------------------------------------------------------------------


def gpu_step(step: Callable[[], None], steps: int) -> float:
    """Milliseconds of a step, by CUDA events around all of them."""
    step()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end) / steps)


def link_bandwidth() -> float:
    """Bytes a second from pinned host memory to the device."""
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    return host.numel() / (gpu_step(lambda: device.copy_(host, non_blocking=True) and None, 10) / 1000)


def with_gpu(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    from lockstep import Accelerator

    x = torch.randn(chosen.rows, WIDTH, device="cuda")
    parameters = chosen.blocks * PARAMETERS_OF_A_BLOCK
    bound_ms = 8 * parameters / link_bandwidth() / 2 * 1000  # 4 bytes each way at once, in fp32
    figures: list[dict[str, Any]] = [{"bound_ms": bound_ms, "parameters": parameters}]
    for parallel in ("", "offload=optimizer"):
        accelerator = Accelerator(parallel=parallel or None)
        model = build(chosen.blocks, "cuda")
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        )

        def step(model: Any = model, optimizer: Any = optimizer, accelerator: Any = accelerator) -> None:
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            optimizer.step()

        figures.append(
            {"what": f"lockstep {parallel or 'on the device'}", "step_ms": gpu_step(step, chosen.steps)}
        )
        accelerator.free_memory()
    return figures + deepspeed_step(chosen, x)


def deepspeed_step(chosen: argparse.Namespace, x: torch.Tensor) -> list[dict[str, Any]]:
    try:
        import deepspeed
    except ImportError:
        return [{"what": "deepspeed", "step_ms": None, "why": "not installed"}]
    settings = {
        "train_micro_batch_size_per_gpu": chosen.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    engine, *_ = deepspeed.initialize(model=build(chosen.blocks), config=settings)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return [{"what": "deepspeed stage 2 offload_optimizer", "step_ms": gpu_step(step, chosen.steps)}]


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    report = common.Report("offload", "Training with state on disk: seconds of a step")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        rows, figures = on_cpu(chosen, folder)
    gpu = with_gpu(chosen) if torch.cuda.is_available() else []
    report.finish(
        ["parallel=", *(f"{name}, s" for name in COLUMNS), "moved, GB", "GB/s", "over the longer bound"],
        rows,
        {"cpu": figures, "gpu": gpu},
        {"steps": chosen.steps, "blocks": chosen.blocks, "rows": chosen.rows, "threads": 1},
        chosen.output,
        [
            f"Medians (quartiles) over {chosen.steps} rounds of 3 steps; ratios compare values of one round.",
            "The bound of a step is the longer of computing alone and moving alone (bytes moved / bandwidth).",
            "After the last step the parameters were those of the plain loop, bit for bit.",
            *(str(figure) for figure in gpu),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
