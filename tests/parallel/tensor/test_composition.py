"""Tensor parallelism with ZeRO's engine, autocast, accumulation, evaluation, generation, and plain inspection."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.parallel.tensor import TensorOptions, tensor_parallel
from lockstep.runtime import start_runtime
from parallel.tensor import problem
from tests.refusals import expect_refusal

BOTH = {"sequence_parallel": True, "loss_parallel": True}


def various() -> dict[str, Any]:
    torch.set_num_threads(1)
    start_runtime(cpu=True)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}

    def make(kind: str = "gpt", **options: Any) -> nn.Module:
        model = problem.make_model(kind)
        tensor_parallel(model, mesh, TensorOptions(**options))
        return model

    found["accumulated"] = problem.train(make(**BOTH), steps=3, accumulation=2)
    found["bf16"] = problem.train(make(**BOTH), steps=3, bf16=True)
    model: Any = make(**BOTH)
    found["names"] = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    found["state"] = {name: problem.whole(value) for name, value in model.state_dict().items()}
    model.eval()
    tokens = problem.batches(1)[0][0]
    with torch.no_grad():
        found["odd"] = model(tokens[:, :7])
        found["even"] = model(tokens)
    model.train()
    expect_refusal(UsageError, "7 positions", model, tokens[:, :7])
    model(tokens)  # it works again
    expect_refusal(UsageError, "'blocks.0'", model.blocks[0], torch.ones(4, problem.WIDTH))
    twin = copy.deepcopy(model)
    assert twin.token.weight is not model.token.weight
    assert torch.equal(problem.whole(twin(tokens)), problem.whole(model(tokens)))
    found["class"] = type(model).__name__, isinstance(model, problem.GPT)
    llama: Any = make("llama", **BOTH)
    llama.eval()
    found["generated"] = llama.generate(input_ids=tokens[:1, :3], max_new_tokens=4, do_sample=False).tolist()
    frozen: Any = problem.make_model("gpt")
    frozen.token.weight.requires_grad_(False)
    tensor_parallel(frozen, mesh)
    problem.loss_of(frozen, *problem.batches(1)[0]).backward()
    found["frozen"] = frozen.token.weight.grad is None and frozen.norm.weight.grad is not None
    expect_refusal(UsageError, "already", tensor_parallel, frozen, mesh)
    plan = {"blocks.*.mlp.2": "rowwise"}
    with pytest.raises(UsageError, match="64 of 128"):
        half: Any = problem.make_model("gpt")
        tensor_parallel(half, mesh, TensorOptions(plan=plan))
        half(tokens)
    split: Any = problem.make_model("gpt")
    tensor_parallel(split, mesh, TensorOptions(plan={"blocks.*.mlp.2": "rowwise_split_input"}))
    found["split input"] = problem.train(split, steps=3)
    return found


def test_it_composes_and_can_be_looked_at(run_distributed) -> None:
    tokens = problem.batches(1)[0][0]
    model = problem.make_model("gpt")
    llama: Any = problem.make_model("llama").eval()
    generated = llama.generate(input_ids=tokens[:1, :3], max_new_tokens=4, do_sample=False).tolist()
    plain = {
        "accumulated": problem.train(problem.make_model("gpt"), steps=3, accumulation=2),
        "bf16": problem.train(problem.make_model("gpt"), steps=3, bf16=True),
        "split input": problem.train(problem.make_model("gpt"), steps=3),
    }
    for found in run_distributed(various, 2, timeout_s=150):
        for name in ("accumulated", "split input"):
            assert problem.loss_difference(found[name].losses, plain[name].losses) < 5e-6
            assert problem.difference(found[name].gradients, plain[name].gradients) < 1e-5
        assert problem.loss_difference(found["bf16"].losses, plain["bf16"].losses) < 2e-3
        assert problem.difference(found["bf16"].gradients, plain["bf16"].gradients) < 5e-2
        assert found["names"] == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in found["state"].items())
        with torch.no_grad():
            torch.testing.assert_close(found["odd"], model(tokens[:, :7]))
            torch.testing.assert_close(found["even"], model(tokens))
        assert found["class"] == ("GPT", True)
        assert found["generated"] == generated
        assert found["frozen"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x.mean(1, keepdim=True))
        return x + self.down(self.up(self.norm(x)).relu())


class WithTables(nn.Module):
    """Parameters of the model itself: two tables that are added, a token before the others, and a scale behind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.columns = (nn.Parameter(torch.randn(1, 5, 16)) for _ in range(2))
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.rows + self.columns
        for block in self.blocks:
            x = block(x)
        return x[:, 0] * self.scale


def gradients_of_rows(parallel: str) -> dict[str, torch.Tensor]:
    """After two backwards of one row each, or of as many micro-batches of one row."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=parallel or None)
    model: Any = accelerator.prepare(WithTables())
    x = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(1))
    for part in (x,) if "pp" in parallel else x.split(1):
        loss = model(part).square().sum() / 4
        accelerator.backward(loss)
    inner = accelerator.unwrap_model(model)
    found = {name: problem.whole(p.grad) for name, p in inner.named_parameters() if p.grad is not None}
    accelerator.free_memory()
    return found


@pytest.mark.parametrize(("ranks", "parallel"), [(2, "tp=2"), (4, "tp=2 pp=2 micro_batches=4 loss=sum")])
def test_gradients_of_single_rows_share_no_memory(run_distributed, ranks: int, parallel: str) -> None:
    expected = gradients_of_rows("")
    seen: set[str] = set()
    for found in run_distributed(gradients_of_rows, ranks, parallel, timeout_s=120):
        seen |= found.keys()
        assert problem.difference(found, {name: expected[name] for name in found}) < 1e-5
    assert seen == expected.keys()
