"""Weights as they come to ``prepare``: tensors in one memory are refused, and trained 16-bit ones become fp32."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel.zero_scenarios import Plain, learn
from tests.refusals import expect_refusal


class LM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)
        )
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def tied_by_data(model: Any) -> None:
    model.head.weight.data = model.tok.weight.data


def tied_transposed(model: Any) -> None:
    model.layers[0][2].weight = nn.Parameter(model.layers[0][0].weight.data.t())


def detached(model: Any) -> None:
    model.prototypes = model.tok.weight.detach()


def in_a_buffer(model: Any) -> None:
    model.register_buffer("prototypes", model.tok.weight.data.T)


def in_a_list(model: Any) -> None:
    model.kept = [model.layers[2][0].bias.detach()]


def in_a_closure(model: Any) -> None:
    weight = model.tok.weight.detach()
    model.score = lambda x: x @ weight.T


def in_a_view_with_a_graph(model: Any) -> None:
    weight = model.tok.weight.T
    model.score = lambda x: x @ weight


def in_a_hook(model: Any) -> None:
    weight = model.tok.weight.data
    model.head.register_forward_hook(lambda module, args, out: out + args[0] @ weight.T)


def as_a_frozen_parameter(model: Any) -> None:
    model.kept = [nn.Parameter(model.tok.weight.data, requires_grad=False)]


OUTSIDE: list[Any] = []


def in_another_model(model: Any) -> None:
    teacher: Any = LM()
    teacher.tok.weight.data = model.tok.weight.data
    OUTSIDE[:] = [teacher]


TIES = [tied_by_data, tied_transposed]
ALIASES = [
    *(detached, in_a_buffer, in_a_list, in_a_closure, in_a_view_with_a_graph, in_a_hook),
    *(as_a_frozen_parameter, in_another_model),
]


def tied_right(model: Any) -> None:
    model.head.weight = model.tok.weight


def in_one_storage(model: Any) -> None:
    """As cuDNN keeps the weights of an LSTM, or columns of a fused projection."""
    bias, other = model.layers[0][0].bias, model.layers[1][0].bias
    both = torch.cat([bias.data, other.data])
    bias.data, other.data = both[:16], both[16:]
    first, second = model.layers[2][0].weight, model.layers[3][0].weight
    columns = torch.cat([first.data, second.data], dim=1)
    first.data, second.data = columns[:, :8], columns[:, 8:]


def kept_copies(model: Any) -> None:
    model.prototypes = model.tok.weight.detach().clone()
    model.weights = [model.tok.weight]


def spectral(model: Any) -> None:
    nn.utils.spectral_norm(model.layers[0][2])


RIGHT = [tied_right, in_one_storage, kept_copies, spectral]


def refused(parallel: str) -> None:
    for change in [*TIES, *ALIASES]:
        accelerator = Accelerator(cpu=True, parallel=parallel)
        model = LM()
        change(model)
        words = "two parameters in one memory" if change in TIES else "in the memory of the parameter"
        expect_refusal(UsageError, words, accelerator.prepare, model)
        OUTSIDE.clear()


def warned_of(parallel: str) -> None:
    model = LM()
    state = model.state_dict()
    with pytest.warns(UserWarning, match="What the script holds is a tensor in the memory of the parameter"):
        Accelerator(cpu=True, parallel=parallel).prepare(model)
    assert state
    model = LM()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(cpu=True, parallel=parallel).prepare(model)


def test_a_state_dict_from_before_prepare_is_warned_of(run_distributed: Any) -> None:
    run_distributed(warned_of, 2, "zero=2")


def transposed_by_a_closure() -> None:
    accelerator = Accelerator(cpu=True, parallel="zero=2")
    plain: Any = LM()
    weight = plain.tok.weight
    accelerator.prepare(plain)
    expect_refusal(UsageError, "The script used a parameter that a model had before", lambda: weight.T)


def test_the_transpose_of_a_parameter_from_before_prepare_is_refused(run_distributed: Any) -> None:
    run_distributed(transposed_by_a_closure, 2)


@pytest.mark.parametrize(("world_size", "parallel"), [(2, "zero=3"), (2, "pp=2"), (4, "zero=2 tp=2")])
def test_tensors_in_the_memory_of_a_parameter_are_refused(
    run_distributed: Any, world_size: int, parallel: str
) -> None:
    run_distributed(refused, world_size, parallel)


def tied_later(parallel: str) -> None:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = accelerator.prepare(LM())

    def tie_and_call() -> None:
        tied_by_data(accelerator.unwrap_model(model))
        model(torch.zeros(2, 6, dtype=torch.long))

    # Which parameters outside of its blocks a stage keeps is known in the first forward.
    words = "two parameters in one memory" if "pp" in parallel else "got the memory of another one"
    expect_refusal(UsageError, words, tie_and_call)


@pytest.mark.parametrize("parallel", ["zero=1", "tp=2", "pp=2"])
def test_weights_that_are_tied_by_data_after_prepare_are_refused(run_distributed: Any, parallel: str) -> None:
    run_distributed(tied_later, 2, parallel)


def tokens(run: Any, step: int) -> torch.Tensor:
    every = torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(step))
    return every.chunk(run.num_processes)[run.process_index]


def train(run: Any, change: Any, lr: float = 0.2, steps: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = LM()
    change(model)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    for step in range(steps):
        batch = tokens(run, step)
        learn(run, optimizer, F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()))
    return whole(run, model)


def whole(run: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    state = run.get_state_dict(model) if isinstance(run, Accelerator) else model.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def trained(parallel: str) -> list[dict[str, torch.Tensor]]:
    return [train(Accelerator(cpu=True, parallel=parallel), change) for change in RIGHT]


@pytest.mark.parametrize(("world_size", "parallel"), [(2, "ddp"), (4, "zero=1")])
def test_other_memory_is_no_reason(run_distributed: Any, world_size: int, parallel: str) -> None:
    expected = [train(Plain(), change) for change in RIGHT]
    for found in run_distributed(trained, world_size, parallel):
        for change, right, state in zip(RIGHT, expected, found, strict=True):
            for name, value in right.items():
                # The vector of spectral norm follows rounding.
                torch.testing.assert_close(
                    state[name], value, atol=1e-4, rtol=1e-4, msg=f"{change.__name__}: {name}"
                )


# -- 16-bit weights --------------------------------------------------------------------------------------


def in_bf16(model: nn.Module) -> None:
    model.bfloat16()


def frozen_in_bf16(model: Any) -> None:
    model.bfloat16()
    model.layers[1].requires_grad_(False)


def moved(parallel: str, precision: str, change: Any) -> tuple[float, set[torch.dtype]]:
    """The part of the trained elements that 20 small steps have moved, and the types of the weights."""
    accelerator = Accelerator(cpu=True, parallel=parallel, mixed_precision=precision)
    found = train(accelerator, change, lr=1e-4, steps=20)
    torch.manual_seed(0)
    model = LM()
    change(model)
    start = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    changed = sum(int((found[name].double() != value.double()).sum()) for name, value in start.items())
    return changed / sum(value.numel() for value in start.values()), {found[name].dtype for name in start}


@pytest.mark.parametrize(
    ("world_size", "parallel"), [(1, "zero=3"), (2, "zero=1"), (4, "zero=3 replicate=2")]
)
@pytest.mark.parametrize("change", [frozen_in_bf16])
def test_trained_weights_of_16_bits_have_an_fp32_master(
    run_distributed: Any, world_size: int, parallel: str, change: Any
) -> None:
    for part, types in run_distributed(moved, world_size, parallel, "bf16", change):
        assert part > 0.9
        assert types == {torch.float32}


def test_without_mixed_precision_weights_keep_their_type(run_distributed: Any) -> None:
    for _, types in run_distributed(moved, 2, "zero=3", "no", in_bf16):
        assert types == {torch.bfloat16}


def test_replicas_in_16_bits_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for precision, change, count in (("bf16", in_bf16, 1), ("no", in_bf16, 0), ("bf16", lambda _: None, 0)):
        caplog.clear()
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = LM()
        change(model)
        with caplog.at_level(logging.WARNING):
            accelerator.prepare(model)
        found = [
            record.getMessage() for record in caplog.records if "trained weights of LM" in record.getMessage()
        ]
        assert len(found) == count
        assert all("('tok.weight', ...)" in text and "dtype=torch.float32" in text for text in found)
