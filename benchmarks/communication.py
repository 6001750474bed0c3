"""Bytes that a rank sends in one training step, counted, and what the formulas say. No clocks.

    python benchmarks/communication.py

``CommCounter`` counts every collective of one step; a ring all-reduce of a payload of B bytes
over N ranks sends 2 (N-1)/N B from each. The payload is 4 bytes a parameter for DDP, 2 with the fp16 or
bf16 hook; PowerSGD of rank r replaces an n x m matrix by (n + m) r numbers where that at least halves it
(Vogels et al., PowerSGD, NeurIPS 2019). DDP also broadcasts the model's buffers, (N-1)/N of their bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import common

RANK = 4
FLOAT_BYTES, HALF_BYTES = 4, 2
MIN_COMPRESSION_RATE = 2
WARM_UP = 4  # DDP rebuilds its buckets after the first step, PowerSGD begins at the third
STEPS = 3
Shapes = Iterable[tuple[int, ...]]


def every_number(bytes_each: int) -> Callable[[Shapes], int]:
    return lambda shapes: bytes_each * sum(prod(shape) for shape in shapes)


def power_sgd(shapes: Shapes) -> int:
    """Bytes of all factors P (n x r) and Q (m x r), and of what is not worth compressing."""
    numbers = 0
    for shape in shapes:
        n, m = shape[0], prod(shape[1:])
        whole, factors = n * m, (n + m) * RANK
        numbers += factors if len(shape) > 1 and factors * MIN_COMPRESSION_RATE < whole else whole
    return FLOAT_BYTES * numbers


# hook -> bytes of payload a step, from the shapes of the parameters
PAYLOADS: dict[str, Callable[[Shapes], int]] = {
    "no": every_number(FLOAT_BYTES),
    "fp16": every_number(HALF_BYTES),
    "bf16": every_number(HALF_BYTES),
    "power_sgd": power_sgd,
}


def ring_bytes(payload: int, world_size: int) -> Fraction:
    return Fraction(2 * (world_size - 1), world_size) * payload


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 processes only")
    parser.add_argument("--processes", type=int, nargs="+", help="world sizes (default 2 4)")
    parser.add_argument(
        "--output", type=Path, help="JSON file (default benchmarks/results/communication.json)"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.processes = chosen.processes or ([2] if chosen.quick else [2, 4])
    return chosen


def worker(output: Path) -> None:
    """One rank: counts the steps with every hook; rank 0 writes them."""
    import torch

    from lockstep import PartialState

    torch.set_num_threads(1)
    found = {hook: count(hook) for hook in PAYLOADS}
    state = PartialState(cpu=True)
    if state.is_main_process:
        output.write_text(json.dumps(found))
    state.wait_for_everyone()


def count(hook: str) -> dict[str, Any]:
    """What this rank's collectives carry in a step with this hook, and the sizes that the formulas take."""
    import torch

    from contenders import TASKS, loss_of
    from lockstep import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs

    state = {"matrix_approximation_rank": RANK, "start_powerSGD_iter": 2} if hook == "power_sgd" else {}
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(hook), comm_state_option=state)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    task = TASKS["gpt"]
    model = task.model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    inputs, targets = task.data(1)[: task.batch_size]

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(inputs), targets))
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    with accelerator.communication() as counter:
        for _ in range(STEPS):
            step()
    return {
        "collectives": counter.count() / STEPS,
        "gradient_bytes_sent": counter.wire_bytes("all_reduce") / STEPS,
        "bytes_sent": counter.wire_bytes() / STEPS,
        "shapes": [list(parameter.shape) for parameter in model.parameters()],
        "buffer_bytes": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    }


def main() -> None:
    chosen = options()
    if chosen.worker is not None:
        worker(chosen.worker)
        return
    report = common.Report("communication", "Bytes a rank sends in one step")
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as folder:
        for world_size in chosen.processes:
            path = Path(folder, f"{world_size}.json")
            common.run_workers(__file__, [*sys.argv[1:], "--worker", str(path)], world_size)
            counted = json.loads(path.read_text())
            for hook, one in counted.items():
                shapes = [tuple(shape) for shape in one.pop("shapes")]
                gradients = ring_bytes(PAYLOADS[hook](shapes), world_size)
                buffers = Fraction(world_size - 1, world_size) * one["buffer_bytes"]
                expected = float(gradients + buffers)
                entry = {
                    "processes": world_size,
                    "hook": hook,
                    **one,
                    "expected_bytes_sent": expected,
                    "counted_over_expected": one["bytes_sent"] / expected,
                    "share_of_fp32": one["bytes_sent"] / counted["no"]["bytes_sent"],
                }
                figures.append(entry)
                rows.append(
                    [
                        hook,
                        str(world_size),
                        f"{one['collectives']:g}",
                        f"{one['bytes_sent']:,.0f}",
                        f"{expected:,.0f}",
                        f"{entry['counted_over_expected']:.4f}",
                        f"{entry['share_of_fp32']:.3f}",
                    ]
                )
    report.finish(
        ["hook", "processes", "collectives", "bytes sent", "formula", "counted / formula", "of fp32"],
        rows,
        figures,
        {"steps": STEPS, "warm_up": WARM_UP, "power_sgd_rank": RANK, "model": "small GPT"},
        chosen.output,
        [
            "Deterministic: bytes of collectives, not of a network. Other transports than a ring send differently."
        ],
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
