"""What would silently be wrong with a split sequence is refused, on every rank, by a message with names and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lockstep.errors import UsageError
from lockstep.model import find_blocks
from lockstep.parallel.context import context_parallel, sequence_dim, split_sequence
from lockstep.runtime import start_runtime
from tests.parallel.split_problem import make_batches, make_gpt, make_llama
from tests.refusals import expect_refusal

BATCH, LENGTH, HEADS, WIDTH = 2, 8, 3, 12


def heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def attend(x: Tensor, **options: Any) -> Tensor:
    q = heads(x)
    return F.scaled_dot_product_attention(q, q, q, **options).transpose(1, 2).flatten(2)


def two_heads(x: Tensor, **options: Any) -> Tensor:
    q = x.unflatten(2, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, **options)


Forward = Callable[[nn.Module, Tensor], Any]
# forward of a block, ring or Ulysses, and what the message says
IN_FORWARD: dict[str, tuple[Forward, str, str]] = {
    "mask": (
        lambda block, x: attend(x, attn_mask=torch.ones(8, 8).triu() > 0),
        "ring",
        "with a mask, but with cp_method=ring no rank sees all keys",
    ),
    "mask of a ring's chunk": (
        lambda block, x: attend(x, attn_mask=torch.ones(4, 4, dtype=torch.bool)),
        "ring",
        r"with a mask \[4, 4\] of the 4 positions that this rank holds",
    ),
    "mask of a chunk": (
        lambda block, x: two_heads(x, attn_mask=torch.ones(4, 4, dtype=torch.bool)),
        "ulysses",
        r"mask is \[4, 4\], but the whole sequence has 8 positions",
    ),
    "dropout": (lambda block, x: attend(x, dropout_p=0.1), "ring", "dropout_p=0.1"),
    "other lengths": (
        lambda block, x: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], is_causal=True),
        "ring",
        "4 queries, 2 keys and 2 values, but each rank holds 4",
    ),
    "heads": (lambda block, x: attend(x), "ulysses", r"'layers\.0': .* 3 heads do not divide by cp = 2"),
    "no attention": (lambda block, x: x * 2, "ring", r"No block from 'layers\.0' to 'layers\.1' called"),
    "other length": (
        lambda block, x: attend(x)[:, :2],
        "ring",
        r"4 positions, but returned \[2, 2, 12\]",
    ),
    "weights": (
        lambda block, x: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)(x, x, x)[0],
        "ring",
        "need_weights=False",
    ),
}


class Block(nn.Module):
    def __init__(self, forward: Forward, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.norm(x))


class Model(nn.Module):
    def __init__(self, forward: Forward, inner: nn.Module | None = None, called: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(forward, inner) for _ in range(2))
        self.called = called

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[2 - self.called :] if self.called != 1 else self.layers[:1]:
            x = layer(x)
        return x


def spread(model: nn.Module, method: str = "ring") -> Any:
    context_parallel(model, find_blocks(model), init_device_mesh("cpu", (dist.get_world_size(),)), method)
    return model


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return "nothing was raised"


def messages_in_forward() -> dict[str, str]:
    start_runtime(cpu=True)
    hidden = torch.randn(BATCH, LENGTH, WIDTH)
    return {
        name: message(lambda forward=forward, method=method: spread(Model(forward), method)(hidden))
        for name, (forward, method, _) in IN_FORWARD.items()
    }


def test_blocks_that_would_mix_positions_are_refused(run_distributed: Callable[..., list[Any]]) -> None:
    for found in run_distributed(messages_in_forward, 2):
        for name, (_, _, expected) in IN_FORWARD.items():
            assert re.search(expected, found[name]), (name, found[name])


def messages_of_models_and_calls() -> dict[str, str]:
    start_runtime(cpu=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    good = spread(Model(lambda block, x: attend(x, is_causal=True)))
    first = good.layers[0]
    llama = make_llama(1)
    llama.config._attn_implementation = "eager"
    batch = make_batches(1)[0]
    long = torch.randn(BATCH, LENGTH + 4 * dist.get_rank(), WIDTH)

    def on_chunks(model: Any, tokens: Tensor, **buffers: Tensor) -> Any:
        tensors = [tokens, *buffers.values()]
        with split_sequence(model, tensors, [1] * len(tensors)):
            return model(tokens, **buffers)

    def backward_too_late() -> None:
        model, tokens = spread(make_llama(1)), make_batches(1)[0]
        on_chunks(model, tokens, position_ids=torch.arange(16)[None]).logits.sum().backward()

    packed = torch.arange(16).remainder(8)[None]
    try:
        backward_too_late()
        late = "nothing"
    except RuntimeError as error:
        late = str(error)
    return {
        "length": message(lambda: good(x[:, :5])),
        "two dims": message(lambda: good(x[0])),
        "twice": message(lambda: spread(good)),
        "order": message(lambda: good.layers[1](x)),
        "last block": message(lambda: spread(Model(good.layers[0].function, called=1))(x)),
        "first length": message(lambda: [first(x), good.layers[1](x)]),
        "batches": message(lambda: spread(Model(lambda block, x: attend(x)))(long)),
        "eager": message(lambda: spread(llama)),
        "cache": message(lambda: spread(make_llama(1))(batch, use_cache=True)),
        "no positions": message(lambda: on_chunks(spread(make_llama(1)), batch)),
        "packed": message(lambda: on_chunks(spread(make_llama(1)), batch, position_ids=packed)),
        "not parallel": message(lambda: on_chunks(make_gpt(1), batch)),
        "two lengths": message(lambda: on_chunks(good, x, y=x[:, :4].clone())),
        "no blocks": message(lambda: context_parallel(nn.Linear(2, 2), {}, init_device_mesh("cpu", (2,)))),
        "late": late,
    }


MESSAGES = {
    "length": r"'layers\.0' gets has 5 positions, which do not divide into cp = 2 .* Pad it to 6",
    "two dims": r"'layers\.0' gets is torch\.float32 \[8, 12\], .* \[batch, sequence, width\]",
    "twice": "context parallel already",
    "order": r"'layers\.1' was called before 'layers\.0'",
    "last block": r"called block 'layers\.0' but not 'layers\.1'",
    "first length": r"'layers\.1' got 8 positions, but after 'layers\.0' each rank has 4",
    "batches": r"shapes \[\(2, 8, 12\), \(2, 12, 12\)\]",
    "eager": r"attn_implementation='eager'.*attn_implementation=\"sdpa\"",
    "cache": "use_cache=False",
    "no positions": "without position_ids",
    "packed": "do not rise by one",
    "not parallel": "No model here is context parallel",
    "two lengths": r"sequences of \[8, 4\] positions",
    "no blocks": "cp=2 splits the sequence between blocks, but no blocks of Linear were found",
    "late": "modified by an inplace operation",
}


def test_models_and_calls_that_cannot_be_split_are_refused(run_distributed: Callable[..., list[Any]]) -> None:
    for found in run_distributed(messages_of_models_and_calls, 2):
        assert found.keys() == MESSAGES.keys()
        for name, expected in MESSAGES.items():
            assert re.search(expected, found[name]), (name, found[name])


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "dim"),
    [
        ("cos", (1, 8, 4), torch.float32, 1),
        ("cos", (2, 8, 8), torch.float32, 1),
        ("freqs", (8, 4), torch.float32, 0),
        ("cache_position", (8,), torch.int64, 0),
        ("position_ids", (2, 8), torch.int64, 1),
        ("rope", (1, 1, 8, 4), torch.float32, 2),
        ("attention_mask", (2, 1, 8, 8), torch.bool, None),
        ("key_padding_mask", (2, 8), torch.bool, None),
        ("position_bias", (1, 4, 8, 8), torch.float32, None),
        ("whatever", (8, 8), torch.float32, None),
        ("time", (2, 12), torch.float32, None),
        ("weights", (12, 8), torch.float32, None),
        ("layer_index", (), torch.int64, None),
    ],
)
def test_which_dim_of_an_argument_is_split(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, dim: int | None
) -> None:
    assert sequence_dim("block", name, torch.zeros(shape, dtype=dtype), batch=2, length=8) == dim


def test_a_row_for_each_sample_or_each_position_is_asked_for() -> None:
    expect_refusal(UsageError, "[8, 4]", sequence_dim, "b", "time", torch.zeros(8, 4), batch=8, length=8)
