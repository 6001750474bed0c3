"""Tensor-parallel training gives the numbers of plain single-process training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.config import Activation
from lockstep.model import find_blocks
from lockstep.parallel import apply_activation_checkpointing
from lockstep.parallel.tensor import TensorOptions, tensor_parallel
from lockstep.runtime import start_runtime
from parallel.tensor import problem

BOTH = {"sequence_parallel": True, "loss_parallel": True}
CASES: dict[tuple[str, int], list[dict[str, Any]]] = {
    # tests/parallel/test_split_parity.py has each option by itself.
    ("gpt", 2): [{**BOTH, "activation": "full"}],
    ("gpt", 4): [BOTH],
    ("llama", 2): [{**BOTH, "activation": "selective"}],
    ("tied-llama", 2): [{"plan": "infer", "loss_parallel": True}],
}


def train(kind: str, cases: list[dict[str, Any]]) -> list[problem.Result]:
    torch.set_num_threads(1)
    world_size = start_runtime(cpu=True).world_size
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    results = []
    for case in cases:
        options = dict(case)
        activation = Activation(options.pop("activation", "none"))
        model = problem.make_model(kind)
        blocks = find_blocks(model)
        tensor_parallel(model, mesh, TensorOptions(**options))
        apply_activation_checkpointing(model, activation, blocks)
        results.append(problem.train(model, fused=bool(case)))
        assert all(not p.is_partial() for q in model.parameters() for p in q.placements)
        assert len({id(p) for p in model.parameters()}) == len({id(p) for p in problem_parameters(kind)})
    return results


def problem_parameters(kind: str) -> list[Any]:
    return list(problem.make_model(kind).parameters())


@pytest.mark.parametrize(("kind", "world_size"), CASES, ids=lambda value: str(value))
def test_training_equals_plain_single_process_training(run_distributed, kind: str, world_size: int) -> None:
    cases = CASES[kind, world_size]
    expected = problem.train(problem.make_model(kind))
    for results in run_distributed(train, world_size, kind, cases, timeout_s=150):
        for result in results:
            assert problem.loss_difference(result.losses, expected.losses) < 5e-6
            assert result.norms == pytest.approx(expected.norms, rel=1e-5)
            assert problem.difference(result.gradients, expected.gradients) < 1e-5
