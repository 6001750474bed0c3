"""Cross entropy of logits that are split over the vocabulary equals torch's on whole logits."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.comm import CommCounter
from lockstep.errors import UsageError
from lockstep.nn import vocab_parallel_cross_entropy
from lockstep.parallel.tensor import handle_split_logits
from lockstep.runtime import start_runtime
from tests.refusals import expect_refusal

CLASSES, TOKENS = 11, 6  # parts of 6 and 5
OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
    for reduction, smoothing, ignored in product(("mean", "sum", "none"), (0.0, 0.1), (-100, 3))
]


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, TOKENS, CLASSES, generator=numbers) * 4).to(dtype)
    target = torch.randint(CLASSES, (2, TOKENS), generator=numbers)
    target[0, 1] = 3
    return logits, target, torch.rand(CLASSES, generator=numbers)


def plain_loops(logits: Any, target: Tensor, weight: Tensor) -> list[Tensor]:
    """What loops do with logits before the loss."""
    return [
        F.cross_entropy(logits.flatten(0, 1).float(), target.flatten()),
        F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), reduction="sum") / 7,
        F.cross_entropy(logits.reshape(-1, logits.size(-1)), target.reshape(-1), weight=weight),
        F.cross_entropy(logits.transpose(1, 2), target),
        F.cross_entropy(logits.permute(0, 2, 1), target, reduction="none").mean(),
        F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), ignore_index=3),
        F.cross_entropy((logits[..., :-1, :].contiguous() * 0.5).flatten(0, 1), target[:, :-1].flatten()),
        F.nll_loss(F.log_softmax(logits.flatten(0, 1), -1), target.flatten()),
        F.log_softmax(logits, dim=-1).square().sum() * 0.01
        if type(logits) is Tensor
        else (F.log_softmax(logits, dim=-1).square().sum() * 0.01).full_tensor(),
    ]


def on_parts() -> dict[str, Any]:
    torch.set_num_threads(1)
    start_runtime(cpu=True)
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    handle_split_logits()
    found: dict[str, Any] = {"own": [], "loops": []}

    def split(dtype: torch.dtype = torch.float32) -> Any:
        return distribute_tensor(problem(dtype)[0], mesh, [Shard(2)]).requires_grad_()

    _, target, weight = problem()
    for options in OPTIONS:
        logits = split()
        loss = vocab_parallel_cross_entropy(logits, target, **options)
        loss.sum().backward()
        found["own"].append((loss.detach(), logits.grad.full_tensor()))
    for index in range(len(plain_loops(problem()[0], target, weight))):
        logits = split()
        loss = plain_loops(logits, target, weight)[index]
        loss.backward()
        found["loops"].append((type(loss) is Tensor, loss.detach(), logits.grad.full_tensor()))
    logits = split(torch.bfloat16)
    with CommCounter() as counter:
        # Of a leaf, torch 2.11 gathers the gradient to copy it.
        loss = vocab_parallel_cross_entropy(logits * 1, target)
        loss.backward()
    found["bf16"] = loss.detach(), logits.grad.full_tensor().float()
    found["bytes"] = counter.payload_bytes("all_reduce"), counter.count()
    expect_refusal(UsageError, "target of shape", vocab_parallel_cross_entropy, logits, target[:1])
    expect_refusal(
        UsageError, "classes", F.nll_loss, distribute_tensor(problem()[0][0], mesh, [Shard(0)]), target[0]
    )
    return found


def test_loss_and_gradient_equal_those_of_whole_logits(run_distributed) -> None:
    _, target, weight = problem()
    for found in run_distributed(on_parts, 2):
        for options, (loss, gradient) in zip(OPTIONS, found["own"], strict=True):
            logits = problem()[0].requires_grad_()
            expected = F.cross_entropy(logits.transpose(1, 2), target, **options)
            expected.sum().backward()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(gradient, logits.grad)
        for index, (is_plain, loss, gradient) in enumerate(found["loops"]):
            logits = problem()[0].requires_grad_()
            expected = plain_loops(logits, target, weight)[index]
            expected.backward()
            assert is_plain
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(gradient, logits.grad)
        logits = problem(torch.bfloat16)[0].requires_grad_()
        expected = F.cross_entropy(logits.float().transpose(1, 2), target)
        expected.backward()
        torch.testing.assert_close(found["bf16"], (expected, logits.grad.float()), rtol=1e-2, atol=1e-3)
        # The maximum, then three numbers, of each token in fp32; nothing in backward.
        assert found["bytes"] == (4 * 2 * TOKENS * 4, 2)


def test_whole_logits_are_refused() -> None:
    logits, target, _ = problem()
    expect_refusal(UsageError, "last dimension", vocab_parallel_cross_entropy, logits, target)
