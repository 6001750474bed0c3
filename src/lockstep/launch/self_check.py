"""What ``lockstep test`` runs in every process: small computations whose results are known otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.accelerator import Accelerator
from lockstep.comm.functional import broadcast

SAMPLES = 37
FEATURES = 5


class Check(NamedTuple):
    """What is verified, and a function that returns what was found; it raises AssertionError if wrong."""

    title: str
    run: Callable[[Accelerator], str]


def check_group(accelerator: Accelerator) -> str:
    ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device))
    _equal(ranks.tolist(), list(range(accelerator.num_processes)))
    return f"{accelerator.num_processes} processes on {accelerator.device.type}, each seen once"


def check_reduce(accelerator: Accelerator) -> str:
    world = accelerator.num_processes
    value = torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)
    total = accelerator.reduce(value, reduction="sum").item()
    mean = accelerator.reduce(value, reduction="mean").item()
    _equal((total, mean), (world * (world + 1) / 2, (world + 1) / 2))
    return f"sum {total:g} = n(n+1)/2, mean {mean:g} = (n+1)/2"


def check_broadcast(accelerator: Accelerator) -> str:
    value = torch.full((3,), float(accelerator.process_index + 7), device=accelerator.device)
    _equal(broadcast(value, from_process=0).tolist(), [7.0, 7.0, 7.0])
    return "rank 0's value everywhere"


def check_data(accelerator: Accelerator) -> str:
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=4, shuffle=True))
    seen = [accelerator.gather_for_metrics(batch) for (batch,) in loader]
    _equal(sorted(torch.cat(seen).tolist()), list(range(SAMPLES)))
    return f"{SAMPLES} samples in shuffled batches of 4, each once"


def check_gradient(accelerator: Accelerator) -> str:
    """Check one step of SGD, on the batches of all processes, against the same step of plain torch."""
    parallel = accelerator.parallel
    if max(parallel.tp, parallel.pp, parallel.cp, parallel.ep) > 1:
        return f"not compared: {parallel} divides the layers of a model, and this check has one"
    world, batch = accelerator.num_processes, 4
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(world * batch, FEATURES, generator=generator)
    targets = torch.randn(world * batch, 1, generator=generator)
    torch.manual_seed(1)
    model = torch.nn.Linear(FEATURES, 1)
    alone = torch.nn.Linear(FEATURES, 1)
    alone.load_state_dict(model.state_dict())
    before = {name: value.clone() for name, value in alone.state_dict().items()}
    torch.nn.functional.mse_loss(alone(features), targets).backward()
    limit_of_norm = accelerator._options.gradient_clipping or float("inf")
    torch.nn.utils.clip_grad_norm_(alone.parameters(), limit_of_norm)

    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    part = slice(accelerator.process_index * batch, (accelerator.process_index + 1) * batch)
    for _ in range(accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            output = model(features[part].to(accelerator.device))
            accelerator.backward(torch.nn.functional.mse_loss(output, targets[part].to(accelerator.device)))
            optimizer.step()
            optimizer.zero_grad()
    after = accelerator.get_state_dict(model)
    worst = 0.0
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        # With a learning rate of 1 the step that was made is the gradient.
        difference = (before[name] - after[name].cpu() - parameter.grad).norm() / parameter.grad.norm()
        worst = max(worst, difference.item())
    # Single precision; autocast and TF32 are coarser.
    limit = 1e-5 if accelerator.mixed_precision == "no" and accelerator.device.type == "cpu" else 2e-2
    assert worst <= limit, f"relative difference {worst:.1e} is above {limit:.0e}"
    return f"relative difference to one process {worst:.1e} (limit {limit:.0e})"


CHECKS = (
    Check("process group", check_group),
    Check("reduce", check_reduce),
    Check("broadcast", check_broadcast),
    Check("data order", check_data),
    Check("gradient", check_gradient),
)


def _equal(found: object, expected: object) -> None:
    assert found == expected, f"found {found}, expected {expected}"


def main() -> int:
    """Run all checks; the number of those that failed on any rank."""
    accelerator = Accelerator()
    rows: list[tuple[str, bool, str]] = []
    for check in CHECKS:
        try:
            good, text = True, check.run(accelerator)
        except AssertionError as error:
            good, text = False, str(error)
        # What one rank has found wrong, every rank counts.
        failed = accelerator.reduce(torch.tensor([0.0 if good else 1.0], device=accelerator.device), "sum")
        rows.append((check.title, good and failed.item() == 0, text))
    if accelerator.is_main_process:
        _show(rows)
    accelerator.end_training()
    return sum(not good for _, good, _ in rows)


def _show(rows: list[tuple[str, bool, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "result", "verified", title="lockstep test", title_justify="left")
    for title, good, text in rows:
        table.add_row(title, "ok" if good else "FAILED", text)
    console = Console(highlight=False)
    console.print(table)
    bad = sum(not good for _, good, _ in rows)
    console.print(f"{bad} of {len(rows)} checks failed." if bad else f"All {len(rows)} checks passed.")


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
