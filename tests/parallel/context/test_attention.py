"""Ring and Ulysses attention, forward and backward, against torch's attention of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lockstep.comm import CommCounter
from lockstep.config import CPMethod
from lockstep.parallel.context import CpuFlash, Plain, SequenceLayout, ring_attention, ulysses_attention
from lockstep.runtime import start_runtime

BATCH, LENGTH = 2, 16


@dataclass(frozen=True)
class Case:
    method: CPMethod
    causal: bool
    heads: tuple[int, int] = (4, 4)
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    mask: str = ""
    positions: int = 0
    """Of each rank; 0: ``LENGTH`` of all."""

    def length(self, ranks: int) -> int:
        return self.positions * ranks or LENGTH


RING, ULYSSES = CPMethod.RING, CPMethod.ULYSSES
CASES = [
    Case(RING, causal=True),
    Case(RING, causal=False),
    Case(RING, causal=True, heads=(4, 2), head_dim=5, scale=0.3),
    Case(RING, causal=False, heads=(6, 1), head_dim=7),
    Case(RING, causal=True, heads=(2, 1), dtype=torch.bfloat16),
    Case(RING, causal=False, dtype=torch.bfloat16),
    Case(RING, causal=True, dtype=torch.float64),
    Case(RING, causal=True, positions=3),
    Case(RING, causal=True, heads=(4, 2), positions=7),
    Case(RING, causal=False, positions=5),
    Case(ULYSSES, causal=True, positions=3),
    Case(ULYSSES, causal=True),
    Case(ULYSSES, causal=False, head_dim=5, scale=0.3),
    Case(ULYSSES, causal=True, heads=(8, 4)),
    Case(ULYSSES, causal=True, heads=(8, 2), dtype=torch.bfloat16),
    Case(ULYSSES, causal=False, heads=(8, 1)),
    Case(ULYSSES, causal=False, mask="bool"),
    Case(ULYSSES, causal=False, heads=(8, 2), mask="heads"),
    Case(ULYSSES, causal=False, mask="keys"),
]


def tensors_of(case: Case, ranks: int = 1) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    heads = (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
    shapes = [(BATCH, count, case.length(ranks), case.head_dim) for count in heads]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes]


def mask_of(case: Case) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(1)
    if case.mask == "bool":
        return torch.rand(BATCH, 1, LENGTH, LENGTH, generator=generator) > 0.3
    if case.mask == "heads":
        return torch.randn(case.heads[0], LENGTH, LENGTH, generator=generator)
    return torch.rand(BATCH, 1, 1, LENGTH, generator=generator) > 0.3 if case.mask else None


def whole(case: Case, ranks: int) -> list[torch.Tensor]:
    """Output and gradients of q, k and v by plain torch."""
    *inputs, gradient = tensors_of(case, ranks)
    inputs = [tensor.double().requires_grad_() for tensor in inputs]
    q, k, v = inputs
    repeat = case.heads[0] // case.heads[1]
    mask = mask_of(case)
    out = F.scaled_dot_product_attention(
        *(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)),
        attn_mask=mask.double() if mask is not None and mask.is_floating_point() else mask,
        is_causal=case.causal,
        scale=case.scale,
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient.double())]


def split(case: Case, layout: SequenceLayout) -> list[torch.Tensor]:
    """The same by the method under test, put together from all ranks."""
    *inputs, gradient = (layout.local(tensor, 2) for tensor in tensors_of(case, layout.size))
    inputs = [tensor.requires_grad_() for tensor in inputs]
    if case.method is RING:
        out = ring_attention(*inputs, layout, case.causal, case.scale)
    else:
        out = ulysses_attention(*inputs, layout, mask_of(case), is_causal=case.causal, scale=case.scale)
    results = [out.detach(), *torch.autograd.grad(out, inputs, gradient)]
    return [layout.gather(result, 2) for result in results]


def layout_of(method: CPMethod) -> SequenceLayout:
    return SequenceLayout(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), method is RING)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def worst_differences() -> Iterator[float]:
    start_runtime(cpu=True)
    for case in CASES:
        results = split(case, layout_of(case.method))
        assert {result.dtype for result in results} == {case.dtype}
        yield max(map(difference, results, whole(case, dist.get_world_size())))


def all_worst_differences() -> list[float]:
    return list(worst_differences())


TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_and_its_gradients_are_those_of_the_whole_sequence(
    run_distributed: Callable[..., list[Any]], world_size: int
) -> None:
    for rank, differences in enumerate(run_distributed(all_worst_differences, world_size)):
        for case, found in zip(CASES, differences, strict=True):
            assert found < TOLERANCES[case.dtype], (rank, case, found)


def sent_by_attention(method: CPMethod, heads: tuple[int, int], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Number and bytes of what this rank sends in a forward and in a backward."""
    start_runtime(cpu=True)
    layout = layout_of(method)
    case = Case(method, causal=True, heads=heads, dtype=dtype)
    *inputs, gradient = (layout.local(tensor, 2) for tensor in tensors_of(case))
    inputs = [tensor.requires_grad_() for tensor in inputs]
    operation = "send" if method is RING else "all_to_all"
    with CommCounter() as forward:
        if method is RING:
            out = ring_attention(*inputs, layout, causal=True)
        else:
            out = ulysses_attention(*inputs, layout, is_causal=True)
    with CommCounter() as backward:
        out.backward(gradient)
    assert forward.count() == forward.count(operation) + forward.count("recv")
    return [(counter.count(operation), int(counter.wire_bytes(operation))) for counter in (forward, backward)]


def test_the_ring_sends_keys_and_values_and_their_gradients_once_around(
    run_distributed: Callable[..., list[Any]],
) -> None:
    ranks, heads, key_heads = 4, 4, 2
    keys = BATCH * key_heads * LENGTH * 8  # numbers in all keys, and in all values
    for counts in run_distributed(sent_by_attention, ranks, RING, (heads, key_heads), torch.bfloat16):
        share = (ranks - 1) / ranks
        assert counts[0] == (2 * (ranks - 1), 2 * keys * share * 2)
        # In backward the keys in bf16 again, and the sums of their gradients in fp32.
        assert counts[1] == (4 * (ranks - 1), 2 * keys * share * 2 + 2 * keys * share * 4)


def test_ulysses_exchanges_four_times_in_forward_and_in_backward(
    run_distributed: Callable[..., list[Any]],
) -> None:
    ranks, heads, key_heads = 2, 4, 2
    numbers = BATCH * LENGTH * 8 * (2 * heads + 2 * key_heads) // ranks  # of this rank's q, k, v and output
    for counts in run_distributed(sent_by_attention, ranks, ULYSSES, (heads, key_heads), torch.float32):
        assert counts == [(4, numbers * 4 * (ranks - 1) // ranks)] * 2


@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_kernel_gives_what_the_flash_kernel_gives(causal: bool) -> None:
    q, k, v, gradient = tensors_of(Case(RING, causal))
    results = []
    for kernel in (CpuFlash(), Plain()):
        out, lse = kernel.forward(q, k, v, causal, 0.3)
        results.append([out, lse, *kernel.backward(gradient, (q, k, v), (out, lse), causal, 0.3)])
    for flash, plain in zip(*results, strict=True):
        torch.testing.assert_close(flash, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_head_and_tail_give_every_rank_the_same_number_of_pairs(size: int) -> None:
    """Pairs of a query and a key that it sees, counted one by one."""
    length = 4 * size
    work = []
    for rank in range(size):
        layout = SequenceLayout(None, size, rank, head_tail=True)  # type: ignore[arg-type]
        positions = layout.local(torch.arange(length), 0)
        work.append(int((positions + 1).sum()))
        held = torch.stack(
            [SequenceLayout(None, size, r, True).local(torch.arange(length), 0) for r in range(size)]
        )  # type: ignore[arg-type]
        assert layout.joined(held, 0).tolist() == list(range(length))
        assert torch.equal(layout.shard_of(torch.arange(length), 0), held)
    assert len(set(work)) == 1 and sum(work) == length * (length + 1) // 2
