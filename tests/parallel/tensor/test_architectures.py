"""Architectures of transformers: each, split by its own plan or by one that is found, equals itself in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.parallel.tensor import TensorOptions, tensor_parallel
from lockstep.runtime import start_runtime
from parallel.tensor import problem
from parallel.tensor.architectures import ARCHITECTURES, difference, make_batch, make_model
from tests.frozen.verdicts import hold

FAST = ("DeepseekV2ForCausalLM", "T5ForConditionalGeneration")


def run(name: str, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    loss: Any = model(**make_batch(name)).loss
    loss.backward()
    return loss.item(), {n: problem.whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def split(names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    start_runtime(cpu=True)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {}
    for name in names:
        model = make_model(name)
        plan = tensor_parallel(model, mesh, TensorOptions(is_main=False))
        found[name] = (len(plan.entries), *run(name, model))
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, id="fast"),
        pytest.param(
            tuple(name for name in ARCHITECTURES if name not in FAST), id="all", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_each_architecture_equals_itself_in_one_process(run_distributed, names: tuple[str, ...]) -> None:
    expected = {name: run(name, make_model(name)) for name in names}
    wrong = []
    verdicts: list[dict[str, tuple[str, str]]] = []
    for rank, found in enumerate(run_distributed(split, 2, list(names), timeout_s=400)):
        verdicts.append({})
        for name in names:
            entries, loss, gradients = found[name]
            assert entries >= 2, f"nothing of {name} was split"
            apart = difference(gradients, expected[name][1])
            is_equal = abs(loss - expected[name][0]) <= 1e-4 and apart <= 1e-3
            verdicts[rank][name] = ("equal" if is_equal else "differs", "")
            if not is_equal:
                wrong.append(f"{name} on rank {rank}: loss {loss}, gradients are off by {apart:.2g}")
    hold("tensor, architectures", verdicts)
    assert not wrong, "\n".join(wrong)
