"""Architectures of transformers: each, split by its own plan or by one that is found, equals itself in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.parallel.tensor import make_plan
from parallel.tensor import problem
from parallel.tensor.architectures import ARCHITECTURES, difference, make_batch, make_model
from tests.frozen.verdicts import hold

FAST = ("DeepseekV2ForCausalLM", "T5ForConditionalGeneration")

REFUSED: dict[str, str] = {}


def run(name: str, model: nn.Module, plain: nn.Module | None = None) -> tuple[float, dict[str, Tensor]]:
    loss: Any = model(**make_batch(name)).loss
    loss.backward()
    return loss.item(), {
        n: problem.whole(p.grad) for n, p in (plain or model).named_parameters() if p.grad is not None
    }


def split(names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        accelerator = Accelerator(cpu=True, parallel="tp=2")
        model = make_model(name)
        try:
            entries = len(make_plan(model, 2).entries)
            prepared = accelerator.prepare(model)
            found[name] = (entries, run(name, prepared, model))
        except UsageError as error:
            found[name] = (2, str(error))
        accelerator.free_memory()
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
            entries, result = found[name]
            assert entries >= 2, f"nothing of {name} was split"
            said, text = "refused", str(result)
            if not isinstance(result, str):
                apart = difference(result[1], expected[name][1])
                is_equal = abs(result[0] - expected[name][0]) <= 1e-4 and apart <= 1e-3
                said, text = "equal" if is_equal else "differs", f"gradients are off by {apart:.2g}"
            verdicts[rank][name] = (said, text)
            if said != ("refused" if name in REFUSED else "equal") or REFUSED.get(name, "") not in text:
                wrong.append(f"{name} on rank {rank} {said}: {text}")
    hold("tensor, architectures", verdicts)
    assert not wrong, "\n".join(wrong)
