"""Training with the sequence split over ranks equals training in one process, in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lockstep.config import Activation
from lockstep.model import find_blocks
from lockstep.parallel import apply_activation_checkpointing
from lockstep.parallel.context import context_parallel, gather_sequence, split_sequence
from lockstep.runtime import start_runtime
from tests.parallel.split_problem import (
    LENGTH,
    MODELS,
    STEPS,
    Result,
    difference,
    loss_of,
    make_batches,
    make_optimizer,
    train,
)

LAYERS = 2


@functools.cache
def expected(kind: str, steps: int = STEPS) -> Result:
    return train(kind, steps=steps, layers=LAYERS)


def prepared(kind: str, method: str, activation: str = "none", shard: bool = False) -> nn.Module:
    """Context parallel over all ranks."""
    torch.set_num_threads(1)
    start_runtime(cpu=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = MODELS[kind](LAYERS)
    blocks = find_blocks(model)
    context_parallel(model, blocks, mesh, method)
    apply_activation_checkpointing(model, Activation(activation), blocks)
    if shard:
        for block in blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Those of sharded parameters are averaged by ``fully_shard``."""
    for parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def train_split(
    kind: str, method: str, activation: str = "none", shard: bool = False, steps: int = STEPS
) -> Result:
    model = prepared(kind, method, activation, shard)
    optimizer = make_optimizer(model)
    result = Result([], [], {}, {})
    for tokens in make_batches(steps):
        loss = loss_of(kind, model, tokens)
        loss.backward()
        average_gradients(model.parameters())
        result.losses.append(loss.item())
        result.gradients = {
            n: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone())
            for n, p in model.named_parameters()
            if p.grad is not None
        }
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        result.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return result


def assert_equal(results: list[Result], one: Result) -> None:
    for result in results:
        assert result.losses == pytest.approx(one.losses, rel=5e-6)
        assert result.norms == pytest.approx(one.norms, rel=1e-5)
        assert result.gradients.keys() == one.gradients.keys()
        assert difference(result.gradients, one.gradients) < 1e-5


@pytest.mark.parametrize(
    ("kind", "method", "activation", "shard", "world_size", "steps"),
    [
        ("gpt", "ring", "none", False, 4, 4),
        ("llama", "ulysses", "none", False, 2, STEPS),
        ("gpt", "ring", "selective", True, 2, 4),
        ("llama", "ulysses", "full", True, 2, 4),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(
    run_distributed: Callable[..., list[Any]],
    kind: str,
    method: str,
    activation: str,
    shard: bool,
    world_size: int,
    steps: int,
) -> None:
    results = run_distributed(
        train_split, world_size, kind, method, activation, shard, steps=steps, timeout_s=120
    )
    assert_equal(results, expected(kind, steps))


# -- split by the caller -------------------------------------------------------------------------------------


def train_on_chunks(method: str, activation: str, steps: int) -> Result:
    """As scripts for Accelerate: labels shifted before the sequence is split, and position ids given."""
    model = prepared("llama", method, activation)
    optimizer = make_optimizer(model)
    result = Result([], [], {}, {})
    for tokens in make_batches(steps):
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        positions = torch.arange(LENGTH)[None]
        kept = positions.clone()
        buffers = [tokens, labels, positions, kept]
        count = dist.get_world_size()
        valid = (labels != -100).sum() / count  # the mean over the ranks is that over the sequence
        with split_sequence(model, buffers, [1, 1, 1, 1], no_restore_buffers=[kept]):
            assert tokens.shape[1] == labels.shape[1] == LENGTH // count
            output = model(
                input_ids=tokens,
                position_ids=positions,
                shift_labels=labels,
                labels=labels,
                num_items_in_batch=valid,
            )
            assert output.logits.shape[:2] == tokens.shape
            logits = gather_sequence(model, output.logits.detach())
            output.loss.backward()
        assert tokens.shape[1] == labels.shape[1] == positions.shape[1] == LENGTH
        assert kept.shape[1] == LENGTH // count
        average_gradients(model.parameters())
        loss = output.loss.detach().clone()
        dist.all_reduce(loss)
        result.losses.append((loss / count).item())
        whole = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        assert whole.item() == pytest.approx(result.losses[-1], rel=1e-6)
        result.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return result


@pytest.mark.parametrize(("method", "activation"), [("ring", "none"), ("ulysses", "full")])
def test_a_caller_who_splits_gets_the_same_numbers(
    run_distributed: Callable[..., list[Any]], method: str, activation: str
) -> None:
    assert_equal(
        run_distributed(train_on_chunks, 2, method, activation, 6, timeout_s=120), expected("llama", 6)
    )
