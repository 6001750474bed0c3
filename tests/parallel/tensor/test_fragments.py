"""What people write between layers: split by the plan that is found, each equals itself in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.parallel.tensor import TensorOptions, run_rehearsal, tensor_parallel
from lockstep.runtime import start_runtime
from parallel.tensor import problem
from parallel.tensor.fragments import FAST, FRAGMENTS, WIDTH, make_model
from tests.frozen.verdicts import hold
from tests.patching import module_of


def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, WIDTH, generator=numbers)
    target = torch.randn(2, 6, WIDTH, generator=numbers)
    y = model(x)
    (y - target).square().mean().backward()
    gradients = {
        name: torch.zeros_like(problem.whole(p)) if p.grad is None else problem.whole(p.grad)
        for name, p in model.named_parameters()
    }
    return y.detach(), gradients


def split(names: list[str], is_compiled: bool = False, ranks: int = 2) -> dict[str, Any]:
    torch.set_num_threads(1)
    start_runtime(cpu=True)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for name in names:
        model = make_model(name)
        plan = tensor_parallel(model, mesh, TensorOptions(plan="infer", is_main=False))
        if is_compiled:
            torch._dynamo.reset()
            for inner in model.inner:
                inner.compile(backend="eager", fullgraph=True)
        layers = sum(
            e.name.startswith("inner.") and e.style.endswith(("colwise", "rowwise")) for e in plan.entries
        )
        reasons = [why for layer, why in plan.left.items() if layer.startswith("inner.")]
        found[name] = (layers, reasons, *run(model))
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
            layers, reasons, y, gradients = found[name]
            apart = problem.difference(gradients, expected[name][1])
            is_equal = torch.allclose(y, expected[name][0], 1e-4, 1e-5) and apart <= 1e-4
            verdicts[rank][name] = ("equal" if is_equal else "differs", "")
            if not is_equal:
                wrong.append(f"{name} on rank {rank}: gradients are off by {apart:.2g}")
            if layers != 2 * FRAGMENTS[name].split:
                wrong.append(
                    f"{name}: {layers} layers of it are split, the others are left because {set(reasons)}"
                )
    hold(f"tensor, {ranks} ranks", verdicts)
    assert not wrong, "\n".join(wrong)


def test_where_whole_tensors_meet_features_is_compiled_in_one_graph(run_distributed) -> None:
    names = ["gate of one", "scale everywhere", "norm and gate"]
    expected = {name: run(make_model(name)) for name in names}
    for found in run_distributed(split, 2, names, True, timeout_s=240):
        for name in names:
            assert problem.difference(found[name][3], expected[name][1]) < 1e-4


def as_before(*_: Any) -> tuple[tuple[str, ...], bool]:
    """Of gradients, a rehearsal finds nothing."""
    return (), False


def refused(names: list[str]) -> list[str]:
    """What the first batch says where gradients are not rehearsed."""
    torch.set_num_threads(1)
    found = []
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module_of(run_rehearsal), "meetings", as_before)
            accelerator = Accelerator(cpu=True, parallel="tp=2")
            model = make_model(name)
            prepared = accelerator.prepare(model)
            try:
                prepared(torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1)))
                found.append("nothing")
            except UsageError as error:
                found.append(str(error))
            accelerator.free_memory()
    return found


def test_without_rehearsed_gradients_the_first_batch_stops_each(run_distributed) -> None:
    modules = {
        "gate of one": "inner.1",
        "own input's mean": "inner.1",
        "scale everywhere": "inner.1",
        "temperature": "inner.1",
        "gated output": "inner.1",
        "norms of heads by keyword": "inner.1",
    }
    for messages in run_distributed(refused, 2, list(modules), timeout_s=120):
        for message, module in zip(messages, modules.values(), strict=True):
            assert "does not compute what the whole model does" in message
            assert f"It begins in module '{module}" in message, message
