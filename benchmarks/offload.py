"""Training with the optimizer, or everything, on disk: the same bits, and how long a step takes.

    python benchmarks/offload.py
    python benchmarks/offload.py --quick

On a CPU: steps of one model through Accelerator with each `offload`, in turns with the plain loop (torch's fused AdamW,
everything in memory: compute alone) and with the input and output that a step has to do (I/O alone: as many bytes, in
blocks, direct, one thread that reads and one that writes). After the last step the parameters are compared bit for bit.

With a GPU: `offload=optimizer` on the device's model beside DeepSpeed's ZeRO-Offload (stage 2, if it is installed), and
the share of the host link's bandwidth: 4 bytes a parameter and step (2 down, 2 up with 16-bit numbers; 8 in fp32).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
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
# Bytes of a step that have to be read and written for each fp32 parameter: weights in forward and in backward;
# gradients in the step, and before it for their norm; weights and two moments in the step.
READ = {"optimizer": 8, "params": 4 + 4 + 8 + 4, "all": 4 + 4 + 8 + 12}
WRITTEN = {"optimizer": 8, "params": 4 + 4, "all": 4 + 12}


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
        self.clip(self.model.parameters(), 1.0)
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


class Transfers:
    """What a step of ``offload`` has to read and write, without computing: blocks through two buffers."""

    def __init__(self, blocks: int, offload: str, folder: str) -> None:
        from lockstep.offload.files import OffloadFile, aligned_buffer

        self.nbytes = PARAMETERS_OF_A_BLOCK * 4
        self.counts = {"read": blocks * READ[offload] // 4, "write": blocks * WRITTEN[offload] // 4}
        self.file = OffloadFile(folder, blocks * self.nbytes)
        self.offsets = [self.file.place(self.nbytes) for _ in range(blocks)]
        self.buffers = {what: aligned_buffer(self.nbytes).zero_() for what in self.counts}
        for offset in self.offsets:
            self.file.write(offset, self.buffers["write"])

    def seconds(self) -> float:
        start = time.perf_counter()
        threads = [threading.Thread(target=self._move, args=(what,)) for what in self.counts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def _move(self, what: str) -> None:
        for i in range(self.counts[what]):
            getattr(self.file, what)(self.offsets[i % len(self.offsets)], self.buffers[what])


def on_cpu(chosen: argparse.Namespace, folder: str) -> tuple[list[list[str]], list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(chosen.rows, WIDTH, generator=generator) for _ in range(3)]
    rows, figures = [], []
    for setting in SETTINGS:
        parallel = setting.format(folder)
        offload = parallel.split()[0].removeprefix("offload=")
        transfers = Transfers(chosen.blocks, offload, folder) if "offload_to" in parallel else None
        plain, ours = Loop(chosen.blocks, None), Loop(chosen.blocks, parallel)
        taken: dict[str, list[float]] = {"plain": [], "offloaded": [], "I/O alone": []}
        for turn in range(-1, chosen.steps):
            values = {"plain": seconds_of_steps(plain, batches), "offloaded": seconds_of_steps(ours, batches)}
            values["I/O alone"] = transfers.seconds() if transfers is not None else 0.0
            if turn >= 0:
                for name, value in values.items():
                    taken[name].append(value)
        same = all(map(torch.equal, plain.weights(), ours.weights()))
        if not same:
            raise SystemExit(f"parameters under {setting} differ from those of the plain loop")
        best = [max(pair) for pair in zip(taken["plain"], taken["I/O alone"], strict=True)]
        ratio = common.summary(common.ratios(taken["offloaded"], best))
        summaries = {name: common.summary(values) for name, values in taken.items()}
        rows.append(
            [setting.format("PATH"), *(one.show(3) for one in summaries.values()), ratio.show(2), "yes"]
        )
        figures.append(
            {
                "parallel": setting.format("PATH"),
                "over max(compute, I/O)": ratio.to_dict(),
                "bit_identical": same,
            }
            | {name: one.to_dict() for name, one in summaries.items()}
        )
        del plain, ours, transfers
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
        ["parallel=", "plain, s", "offloaded, s", "I/O alone, s", "over the larger", "same bits"],
        rows,
        {"cpu": figures, "gpu": gpu},
        {"steps": chosen.steps, "blocks": chosen.blocks, "rows": chosen.rows, "threads": 1},
        chosen.output,
        [
            f"Medians (quartiles) over {chosen.steps} rounds of 3 steps; ratios compare values of one round.",
            *(str(figure) for figure in gpu),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
