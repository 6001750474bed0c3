"""What people write between layers: split by the plan that is found, each equals itself in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.parallel.tensor import make_plan
from parallel.context.comparing import Result, fast_and_all, verdicts, what_is_wrong
from parallel.tensor import problem
from parallel.tensor.fragments import FAST, FRAGMENTS, WIDTH, make_model
from tests.frozen.verdicts import hold


def run(model: nn.Module, plain: nn.Module | None = None) -> Result:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, WIDTH, generator=numbers)
    target = torch.randn(2, 6, WIDTH, generator=numbers)
    loss = (model(x) - target).square().mean()
    loss.backward()
    gradients = {
        name: torch.zeros_like(problem.whole(p)) if p.grad is None else problem.whole(p.grad)
        for name, p in (plain or model).named_parameters()
    }
    return loss.item(), gradients


def split(names: list[str], is_compiled: bool = False, ranks: int = 2) -> dict[str, Any]:
    """Fragment -> how many layers of it are split, and outputs and gradients or why it is refused."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        accelerator = Accelerator(cpu=True, parallel=f"tp={ranks} tp_plan=infer")
        model = make_model(name)
        layers = [e.style for e in make_plan(model, ranks).entries if e.name.startswith("inner.")]
        prepared = accelerator.prepare(model)
        if is_compiled:
            torch._dynamo.reset()
            for inner in model.inner:
                inner.compile(backend="eager", fullgraph=True)
        try:
            found[name] = (len(layers), run(prepared, model))
        except UsageError as error:
            found[name] = (len(layers), str(error))
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("names", fast_and_all(FAST, FRAGMENTS))
def test_each_fragment_equals_itself_in_one_process(
    run_distributed, names: tuple[str, ...], ranks: int
) -> None:
    expected = {name: run(make_model(name)) for name in names}
    refused = {
        name: f"{FRAGMENTS[name].refused}|This rank stops with it."
        for name in names
        if FRAGMENTS[name].refused
    }
    wrong, of_ranks = [], []
    for found in run_distributed(split, ranks, list(names), False, ranks, timeout_s=240):
        results = {name: result for name, (_, result) in found.items()}
        of_ranks.append(verdicts(results, expected, problem.difference, 1e-5, 1e-4))
        wrong += what_is_wrong(of_ranks[-1], refused)
        layers = {name: count for name, (count, _) in found.items()}
        assert layers == {name: 2 * FRAGMENTS[name].split for name in names}
    hold(f"tensor, {ranks} ranks", of_ranks)
    assert not wrong, "\n".join(wrong)


def test_where_whole_tensors_meet_features_is_compiled_in_one_graph(run_distributed) -> None:
    names = ["gate of one", "scale everywhere", "norm and gate"]
    expected = {name: run(make_model(name)) for name in names}
    for found in run_distributed(split, 2, names, True, timeout_s=240):
        for name in names:
            assert problem.difference(found[name][1][1], expected[name][1]) < 1e-4
