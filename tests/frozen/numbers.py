"""Forty configurations, five steps each: losses, norms of gradients, and how far the weights have moved.

``numbers.json`` has all digits, so that a file that is written again on one machine shows by its diff where any bit has
moved. Tests allow for the rounding of other processors' kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from parallel import split_problem as problem
from parallel.test_split_parity import Case, train

STEPS = 5
SPLITS = (
    *("", "zero=1", "zero=2", "zero=3", "tp=2", "tp=2 sequence_parallel"),
    *("cp=2", "cp=2 cp_method=ulysses", "pp=2"),
)


def half(precision: str) -> dict[str, Any]:
    """Return the settings of a case in 16 bits. Adam would make full steps of the rounding of small gradients."""
    return {"precision": precision, "optimizer": "sgd"}


CASES = [
    replace(case, steps=STEPS)
    for case in (
        Case(1, ""),
        Case(1, "", "llama", accumulation=2),
        Case(1, "", accumulation=2, **half("bf16")),
        Case(1, "", **half("fp16")),
        *(Case(2, words) for words in SPLITS),
        *(Case(2, words, "llama", accumulation=2, **half("bf16")) for words in SPLITS),
        *(Case(2, words, **half("fp16")) for words in ("", "zero=3", "pp=2")),
        Case(2, "zero=2", accumulation=2, optimizer="sgd"),
        Case(2, "zero=3 activation=full", "llama"),
        Case(2, "tp=2 loss_parallel"),
        Case(2, "pp=2 schedule=gpipe", accumulation=2),
        Case(2, "ep=2", "experts"),
        Case(4, "zero=3 replicate=2"),
        Case(4, "zero=3", **half("bf16")),
        Case(4, "zero=3 tp=2", accumulation=2),
        Case(4, "zero=3 pp=2", "llama"),
        Case(4, "pp=2 tp=2", "llama"),
        Case(4, "cp=2 tp=2", "llama"),
        Case(4, "cp=2", accumulation=2),
        Case(4, "pp=2", accumulation=2),
        Case(4, "pp=4", "llama"),
        Case(4, "ep=2", "experts", accumulation=2),
    )
]
IN_FULL = {"losses": 5e-6, "norms": 2e-5, "moved": 5e-5}
IN_HALF = {"losses": 5e-4, "norms": 5e-3, "moved": 3e-2}
"""Relative differences that other kernels may make.

Between AVX-512 with bf16 and the plainest kernels (those of ``ATEN_CPU_CAPABILITY=default``, of oneDNN's SSE41 and of
MKL's compatible mode) they are 5e-7 in full precision; in 16 bits 1e-5 in losses, 2e-4 in norms and 3e-3 in weights.
"""


def measure(world_size: int, run: Callable[..., Any]) -> dict[Case, dict[str, list[float]]]:
    """Train each case of so many ranks; ``moved``: the norm of the change of weights, and its product with a fixed
    direction."""
    cases = [case for case in CASES if case.world_size == world_size]
    found = zip(*run(train_all, world_size, cases, timeout_s=300), strict=True)
    return {
        case: measured(case, results[0], {n: p for result in results for n, p in result.parameters.items()})
        for case, results in zip(cases, found, strict=True)
    }


def train_all(cases: list[Case]) -> list[problem.Result]:
    return [train(case) for case in cases]


def plainly(case: Case) -> dict[str, list[float]]:
    """Train in plain torch, in one process and in full precision."""
    result = problem.train(case.model, case.steps, case.accumulation, case.optimizer, layers=case.layers)
    return measured(case, result, result.parameters)


def measured(
    case: Case, result: problem.Result, parameters: dict[str, torch.Tensor]
) -> dict[str, list[float]]:
    start = {n: p.detach() for n, p in problem.MODELS[case.model](case.layers).named_parameters()}
    assert parameters.keys() == start.keys()
    change = torch.cat([(parameters[n].double() - p.double()).flatten() for n, p in start.items()])
    direction = torch.randn(len(change), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    moved = [change.norm().item(), (change @ direction).item()]
    found = {"losses": result.losses, "norms": result.norms, "moved": moved}
    return {name: [float(f"{value:.9g}") for value in values] for name, values in found.items()}


def apart(case: Case, found: dict[str, list[float]], frozen: dict[str, list[float]]) -> list[str]:
    """Return what differs by more than rounding. Both numbers of ``moved`` are compared with the first, the norm."""
    allowed = IN_FULL if case.precision == "no" else IN_HALF
    return [
        f"{name}: {found[name]} instead of {values}"
        for name, values in frozen.items()
        for mine, theirs in zip(found[name], values, strict=True)
        if not abs(mine - theirs) <= allowed[name] * abs(values[0] if name == "moved" else theirs)
    ]
