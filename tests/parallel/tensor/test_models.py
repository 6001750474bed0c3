"""Models of other structures, split by the plan that is found for them, compute what they computed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.tensor import TensorOptions, tensor_parallel
from lockstep.runtime import start_runtime
from parallel.tensor import problem
from parallel.tensor.test_plans import WIDTH, Gated, Interleaved, Separate


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))


class Around(nn.Module):
    """A split module among others that stay whole."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Recurrent(nn.Module):
    """Its weights are in a list too, and a scalar is used in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.mlp = nn.LSTM(WIDTH, WIDTH, batch_first=True), mlp()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.recurrent(x)[0]) * self.scale


class Lists(nn.Module):
    """Parameters in a list, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])
        self.mlp, self.norm = mlp(), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mlp(x @ self.matrices[0] + x @ self.matrices[1]))


class Tied(nn.Module):
    """The embedding's weight is used by hand, transposed, and in a way that needs all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.mlp = nn.Embedding(31, WIDTH, padding_idx=3), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(self.token(tokens_of(x)))
        return (x @ self.token.weight.T)[..., :WIDTH] + self.token.weight.mean(0)


class Bert(nn.Module):
    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            vocab_size=31,
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bert(input_ids=tokens_of(x)).last_hidden_state


def tokens_of(x: Tensor) -> Tensor:
    return (x[..., 0].abs() * 10).long() % 31


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention and MLP in one": lambda: nn.Sequential(Separate(), Separate()),
    "rows by heads": lambda: Around(Interleaved()),
    "gated": lambda: Around(Gated(packed=False)),
    "packed": lambda: Around(Gated(packed=True)),
    "torch's encoder layer": lambda: Around(nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True)),
    "recurrent": Recurrent,
    "lists": Lists,
    "tied by hand": Tied,
    "bert": Bert,
}


def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    y = model(x)
    (y * torch.linspace(-1, 1, WIDTH)).square().sum().backward()
    gradients = {name: problem.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return y.detach(), gradients, model.eval()(x)


def split() -> dict[str, Any]:
    torch.set_num_threads(1)
    start_runtime(cpu=True)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        plan = tensor_parallel(model, mesh, TensorOptions(plan="infer"))
        found[name] = (*run(model), len(plan.entries))
    return found


def test_they_equal_themselves_in_one_process(run_distributed) -> None:
    for found in run_distributed(split, 2, timeout_s=150):
        for name, make in MODELS.items():
            torch.manual_seed(0)
            y, gradients, evaluated = run(make())
            assert found[name][3] >= 2, "nothing was split"
            torch.testing.assert_close(found[name][0], y)
            torch.testing.assert_close(found[name][1], gradients, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found[name][2], evaluated)
