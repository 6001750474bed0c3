"""What people write between layers: split by the plan that is found, each equals itself in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.parallel.tensor import make_plan
from parallel.tensor import problem
from parallel.tensor.fragments import FAST, FRAGMENTS, WIDTH, make_model
from tests.frozen.verdicts import hold


def run(model: nn.Module, plain: nn.Module | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, WIDTH, generator=numbers)
    target = torch.randn(2, 6, WIDTH, generator=numbers)
    y = model(x)
    (y - target).square().mean().backward()
    gradients = {
        name: torch.zeros_like(problem.whole(p)) if p.grad is None else problem.whole(p.grad)
        for name, p in (plain or model).named_parameters()
    }
    return y.detach(), gradients


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
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, id="fast"),
        pytest.param(
            tuple(name for name in FRAGMENTS if name not in FAST), id="all", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_each_fragment_equals_itself_in_one_process(
    run_distributed, names: tuple[str, ...], ranks: int
) -> None:
    expected = {name: run(make_model(name)) for name in names}
    wrong = []
    verdicts: list[dict[str, tuple[str, str]]] = []
    for rank, found in enumerate(run_distributed(split, ranks, list(names), False, ranks, timeout_s=240)):
        verdicts.append({})
        for name in names:
            layers, result = found[name]
            refused = FRAGMENTS[name].refused
            if isinstance(result, str):
                is_right = (refused in result and refused != "") or "This rank stops with it." in result
                verdicts[rank][name] = ("refused" if is_right else "differs", result)
            else:
                apart = problem.difference(result[1], expected[name][1])
                is_right = torch.allclose(result[0], expected[name][0], 1e-4, 1e-5) and apart <= 1e-4
                is_right &= not refused
                verdicts[rank][name] = (
                    "equal" if is_right else "differs",
                    f"gradients are off by {apart:.2g}",
                )
            if not is_right:
                wrong.append(f"{name} on rank {rank}: {verdicts[rank][name]}")
            if layers != 2 * FRAGMENTS[name].split:
                wrong.append(f"{name}: {layers} layers of it are split")
    hold(f"tensor, {ranks} ranks", verdicts)
    assert not wrong, "\n".join(wrong)


def test_where_whole_tensors_meet_features_is_compiled_in_one_graph(run_distributed) -> None:
    names = ["gate of one", "scale everywhere", "norm and gate"]
    expected = {name: run(make_model(name)) for name in names}
    for found in run_distributed(split, 2, names, True, timeout_s=240):
        for name in names:
            assert problem.difference(found[name][1][1], expected[name][1]) < 1e-4
