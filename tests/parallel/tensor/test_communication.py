"""What is sent in a step, and what a rank holds, are what the papers say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from lockstep.comm import CommCounter
from lockstep.parallel.tensor import TensorOptions, tensor_parallel
from lockstep.runtime import start_runtime
from parallel.tensor import problem

ACTIVATIONS = problem.BATCH * problem.LENGTH * problem.WIDTH * 4  # bytes of b*s*h in fp32


def count(kind: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    start_runtime(cpu=True)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tokens, labels = problem.batches(1)[0]
    found: dict[str, Any] = {}
    for sequence in (False, True):
        model = problem.make_model(kind)
        plan = tensor_parallel(model, mesh, TensorOptions(sequence_parallel=sequence, loss_parallel=True))
        with CommCounter() as counter:
            problem.loss_of(model, tokens, labels).backward()
        found[f"sequence={sequence}"] = Counter((r.operation, r.payload_bytes) for r in counter.records)
    parameters = list(model.parameters())
    split = [p for p in parameters if not p.placements[0].is_replicate()]
    found["share"] = sum(p.to_local().numel() for p in split) / sum(p.numel() for p in split)
    found["gradients"] = all(p.grad.to_local().shape == p.to_local().shape for p in parameters)
    found["entries"] = len(plan.entries)
    return found


def test_a_block_sends_four_all_reduces_of_its_activations(run_distributed) -> None:
    # Weight and bias of two norms, and the bias of the second MLP layer.
    norms = problem.LAYERS * 4 + problem.LAYERS
    losses = problem.BATCH * problem.LENGTH * 4
    for found in run_distributed(count, 2, "gpt"):
        assert found["sequence=False"] == {
            # Two more for the embedding's output and the output layer's input.
            ("all_reduce", ACTIVATIONS): 4 * problem.LAYERS + 2,
            # Maximum, sum of exponentials, logit of the target; in backward the sum of gradients.
            ("all_reduce", losses): 4,
        }
        assert found["sequence=True"] == {
            ("all_gather", ACTIVATIONS): 4 * problem.LAYERS + 2,  # as the blocks are left, and entered
            ("reduce_scatter", ACTIVATIONS): 4 * problem.LAYERS,
            ("all_reduce", ACTIVATIONS): 2,
            ("all_reduce", problem.WIDTH * 4): norms,
            ("all_reduce", losses): 4,
        }
        assert abs(found["share"] - 0.5) < 0.05 * 0.5
        assert found["gradients"]


def test_projections_that_read_the_same_input_send_it_once(run_distributed) -> None:
    at_the_ends = 2 if problem.plan_splits_embedding(problem.make_model("llama")) else 1
    for found in run_distributed(count, 2, "llama"):
        assert found["sequence=False"]["all_reduce", ACTIVATIONS] == 4 * problem.LAYERS + at_the_ends
        assert found["sequence=True"]["all_gather", ACTIVATIONS] == 4 * problem.LAYERS + 2
        assert abs(found["share"] - 0.5) < 0.05 * 0.5
