"""The parallel layers compute what the plain layers compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.nn import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from lockstep.parallel.tensor import TensorOptions, tensor_parallel
from lockstep.runtime import start_runtime
from parallel.tensor import problem

WIDTH, LENGTH = 16, 6


def make(name: str, mesh: Any, sequence_parallel: bool = False) -> nn.Module:
    torch.manual_seed(0)
    shared: dict[str, Any] = {"mesh": mesh}
    split: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence_parallel}
    layers: dict[str, Callable[[], nn.Module]] = {
        "column": lambda: ColumnParallelLinear(WIDTH, 11, gather_output=True, **split),
        "row": lambda: RowParallelLinear(WIDTH, 10, input_is_parallel=False, **shared),
        "embedding": lambda: VocabParallelEmbedding(9, WIDTH, padding_idx=7, **shared),
        "mlp": lambda: ParallelMLP(WIDTH, **split),
        "gated": lambda: ParallelMLP(WIDTH, 24, activation=F.silu, gated=True, bias=False, **split),
        "attention": lambda: ParallelAttention(WIDTH, 4, **split),
        "grouped": lambda: ParallelAttention(WIDTH, 8, kv_heads=2, causal=False, **split),
    }
    return layers[name]()


def plain_reference(name: str) -> nn.Module:
    """torch's own layer with the same seed."""
    torch.manual_seed(0)
    layers: dict[str, Callable[[], nn.Module]] = {
        "column": lambda: nn.Linear(WIDTH, 11),
        "row": lambda: nn.Linear(WIDTH, 10),
        "embedding": lambda: nn.Embedding(9, WIDTH, padding_idx=7),
        "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
    }
    return layers[name]() if name in layers else make(name, None)


def inputs(name: str) -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    if name == "embedding":
        return torch.randint(9, (2, LENGTH), generator=numbers)
    return torch.randn(2, LENGTH, WIDTH, generator=numbers)


def run(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    x = x.clone().requires_grad_(x.is_floating_point())
    y = module(x)
    (y.float() * torch.linspace(-1, 1, y.shape[-1])).square().sum().backward()
    return y.detach(), x.grad, [problem.whole(p.grad) for p in module.parameters()]


def outputs(names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    start_runtime(cpu=True)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for name in names:
        module = make(name, mesh)
        found[name] = (*run(module, inputs(name)), [problem.whole(p) for p in module.parameters()])
    rank = mesh.get_local_rank()
    for name in ("mlp", "gated", "attention", "grouped"):
        y, gradient, gradients = run(make(name, mesh, True), inputs(name).chunk(2, dim=1)[rank])
        found[f"{name} in chunks"] = (y, gradient, gradients, [])
    torch.manual_seed(0)
    model = nn.Sequential(ParallelMLP(WIDTH, mesh=mesh), nn.LayerNorm(WIDTH), make("attention", mesh))
    plan = tensor_parallel(model, mesh, TensorOptions())
    found["model"] = run(model, inputs("mlp"))[0], [str(p.placements) for p in model.parameters()], str(plan)
    return found


def test_they_equal_plain_layers_of_the_same_seed(run_distributed) -> None:
    names = ["column", "row", "embedding", "mlp", "gated", "attention", "grouped"]
    results = run_distributed(outputs, 2, names, timeout_s=150)
    torch.manual_seed(0)
    model = nn.Sequential(ParallelMLP(WIDTH), nn.LayerNorm(WIDTH), make("attention", None))
    for result in results:
        for name in names:
            module = plain_reference(name)
            y, gradient, gradients, values = result[name]
            expected_y, expected_gradient, expected = run(module, inputs(name))
            torch.testing.assert_close(y, expected_y)
            torch.testing.assert_close(gradient, expected_gradient)
            torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
            assert all(map(torch.equal, values, module.parameters()))
        torch.testing.assert_close(result["model"][0], run(model, inputs("mlp"))[0])
        assert result["model"][1].count("(Replicate(),)") == 4  # the norm's, and two biases of row layers
    for name in ("mlp", "gated", "attention", "grouped"):
        expected_y, expected_gradient, expected = run(plain_reference(name), inputs(name))
        chunks = [result[f"{name} in chunks"] for result in results]
        torch.testing.assert_close(torch.cat([chunk[0] for chunk in chunks], dim=1), expected_y)
        torch.testing.assert_close(torch.cat([chunk[1] for chunk in chunks], dim=1), expected_gradient)
        for chunk in chunks:
            torch.testing.assert_close(chunk[2], expected, rtol=1e-4, atol=1e-5)


class FourRanks:
    """A mesh as far as a size is asked for."""

    def size(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("make_layer", "message"),
    [
        (lambda mesh: ColumnParallelLinear(8, 6, mesh=mesh), "6 output features .* tp=4"),
        (lambda mesh: RowParallelLinear(6, 8, mesh=mesh), "6 input features .* tp=4"),
        (lambda mesh: ParallelMLP(8, 10, mesh=mesh), "10 hidden features .* tp=4"),
        (lambda mesh: ParallelAttention(12, 6, mesh=mesh), "6 heads .* tp=4"),
        (lambda mesh: ParallelAttention(16, 8, kv_heads=2, mesh=mesh), "2 key-value heads .* tp=4"),
        (lambda mesh: ParallelAttention(16, 3, mesh=mesh), "width=16, heads=3"),
        (lambda mesh: VocabParallelEmbedding(5, 8, mesh=mesh), "vocabulary of 5"),
    ],
)
def test_sizes_that_do_not_divide_are_named(make_layer: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_layer(FourRanks())
