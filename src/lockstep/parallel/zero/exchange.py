"""FSDP2's collectives in other forms: on CPUs in fewer copies than gloo's own, and as integers of 8 or 4 bits.

*On CPUs* that communicate through gloo the bytes are the same. With torch 2.13 and 2 to 8 ranks on one machine, from
4 MiB up, broadcasts of all ranks' parts at once take 0.6 to 0.8 of the time of gloo's all-gather, and an all-to-all
with a local sum 0.3 to 0.6 of that of its reduce-scatter (``benchmarks/collectives.py``).

*Quantised*, after Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023: its
qwZ (weights) and qgZ (gradients), in plain torch operations, for any device and backend of FSDP2. It differs:

- Gradients take one all-to-all over the ranks that share a model, where qgZ takes two, inside a node and then
  between nodes, and quantises again in between. One hop has one quantisation error.
- A block is 256 values and its scale a float32, 1/64 of the bytes of 8-bit integers. The blocks are cut from
  the flat buffer of a group of parameters, so that one may span the end of a parameter and the next one's
  beginning, whose errors then follow the larger of the two.
- With a secondary partition (hpZ) its gathers are exact: its shards are cut from weights that were quantised
  when they were gathered from all ranks, so that backward sees the weights that forward saw.

The number of bytes is :func:`lockstep.comm.quantization.message_bytes` for each rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.comm.exchange import all_gather_into_tensor, reduce_scatter_tensor
from lockstep.comm.quantization import from_message, to_message
from lockstep.config.enums import QuantizedType
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime.clock import waiting_for_ranks
from lockstep.shared_memory.buffers import GatheredBuffers, ReducedBuffers
from lockstep.shared_memory.group import SharedMemoryGroup
from lockstep.torch_internals import c10d, fsdp2, gloo
from lockstep.torch_internals.fsdp2_gathered import ShardedModule

MOST_RANKS = 8
"""Groups above this use gloo's own: nobody has measured them."""


class ShardCollective:
    """The part of FSDP2's ``Comm`` that says where buffers come from: from the allocator, as torch's own."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class BroadcastAllGather(ShardCollective):
    """FSDP2's ``AllGather``: each rank broadcasts its part, all at once.

    Attributes:
        buffers: Where outputs lie if the group shares memory, so that nothing is copied from rank to rank.
    """

    def __init__(self) -> None:
        self.buffers: GatheredBuffers | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self.buffers is None:
            return super().allocate(size, dtype=dtype, device=device)
        return self.buffers.allocate(math.prod(map(int, size)), dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` (n,) of every rank, in rank order, into ``output_tensor`` (N n,)."""
        if async_op or not is_small_on_gloo(group):
            with waiting_for_ranks():
                return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        parts = output_tensor.chunk(group.size())
        own = parts[group.rank()]
        # FSDP2 itself gathers from this part of the output.
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        with waiting_for_ranks():
            # All are started before the first is waited for, so that every rank sends at once.
            under_way = [
                dist.broadcast(part, group=group, group_src=rank, async_op=True)
                for rank, part in enumerate(parts)
            ]
            for one in under_way:
                one.wait()
        return None


class ExchangeReduceScatter(ShardCollective):
    """FSDP2's ``ReduceScatter``: an all-to-all and a sum in rank order.

    Attributes:
        buffers: Where inputs lie if the group shares memory, so that each rank adds up what the others have written.
    """

    def __init__(self) -> None:
        self.buffers: ReducedBuffers | None = None
        # Of the output that is to come after the last input; 0: none is awaited.
        self._output_elements = 0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an input, and then its output, which keeps its own memory: gradients are views of it."""
        elements = math.prod(map(int, size))
        # FSDP2 asks for an input (N n,) and then for its output (n,); nothing but the size tells them apart.
        if self.buffers is None or elements == self._output_elements:
            self._output_elements = 0
            return super().allocate(size, dtype=dtype, device=device)
        self._output_elements = elements // self.buffers.slots.ranks
        return self.buffers.allocate(elements, dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (N n,) over the ranks; this rank's part of the result into ``output_tensor`` (n,).

        Raises:
            UsageError: ``op`` is not SUM, AVG or PREMUL_SUM, or this torch asks for an output before its input.
        """
        factor = factor_of(op, group.size())
        if self._output_elements:
            raise UsageError(
                f"torch {torch.__version__} asks for the memory of gradients in another order than this version of "
                "Lockstep knows. Use lockstep launch --backend gloo, or a torch that the README lists."
            )
        if not is_small_on_gloo(group):
            with waiting_for_ranks():
                return reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)
        # No rank waits for another's sum: each adds up its own part.
        # Row r of what is received is what rank r adds to this rank's part; rows are always summed in this order.
        received = torch.empty_like(input_tensor)
        with waiting_for_ranks():
            dist.all_to_all_single(received, input_tensor, group=group)
        # [N n] -> [N, n] -> [n], rounded once. torch.sum would begin with 0.0, and lose the sign of zeros.
        total, *others = received.view(group.size(), -1)
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        for row in others:
            total.add_(row)
        output_tensor.copy_(total if factor == 1 else total.mul_(factor))
        return None


def is_small_on_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether these forms are faster than the group's own collectives."""
    return group.size() <= MOST_RANKS and gloo.carries(c10d.CPU, group)


def factor_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType, world_size: int) -> float | torch.Tensor:
    """Return what the sum over the ranks is multiplied by: a number, or a tensor inside PREMUL_SUM."""
    kind, factor = c10d.reduction_of(op)
    if kind == dist.ReduceOp.SUM:
        return 1
    if kind == dist.ReduceOp.AVG:
        return 1 / world_size
    if kind == dist.ReduceOp.PREMUL_SUM and factor is not None:
        return factor
    raise UsageError(
        f"Gradients of shards cannot be reduced with {kind.name}. Use SUM, AVG or PREMUL_SUM with a factor."
    )


def exchange_on_cpu(groups: Sequence[ShardedModule], gathers_in_parts: bool) -> list[ShardCollective]:
    """Set these collectives on modules that were sharded over a CPU mesh, if this torch lets them be set; the two.

    Args:
        groups: The sharded modules.
        gathers_in_parts: Whether some gathers run over other ranks (hpZ).
    """
    if not hasattr(FSDPModule, "set_custom_all_gather") or not hasattr(
        FSDPModule, "set_custom_reduce_scatter"
    ):
        return []
    # The buffers belong to one process group: they serve only if all modules are gathered over the same one.
    over = {fsdp2.all_gather_group(owned) for module in groups for owned in fsdp2.param_groups(module)}
    backend = c10d.backend_of(over.pop(), c10d.CPU) if len(over) == 1 and not gathers_in_parts else None
    gather, reduce = BroadcastAllGather(), ExchangeReduceScatter()
    if isinstance(backend, SharedMemoryGroup):
        gather.buffers, reduce.buffers = backend.gathered, backend.reduced
    for module in groups:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
    return [gather, reduce]


BITS = {QuantizedType.INT8: 8, QuantizedType.INT4: 4}


def quantize_collectives(
    model: nn.Module, weights: QuantizedType | None, gradients: QuantizedType | None
) -> None:
    """Quantise the all-gathers and reduce-scatters of every ``fully_shard`` module in ``model``; None: leave them.

    ``weights``: INT8. The shards stay exact, and the optimizer steps on them. Each rank computes with the same
    weights, bit for bit: every rank's part is dequantised, its own too. An element is off by at most A / 254,
    with A the largest absolute value of its block, plus rounding.

    ``gradients``: INT8 or INT4. Each rank's gradients are quantised, exchanged and added in float32. An
    averaged element is off by at most the mean over the ranks of A / 254 (INT8) or A / 14 (INT4), plus
    rounding. A gradient that is not finite on any rank makes its block so on the rank that owns it.

    On a 2-D mesh (hybrid sharding) only the reduce-scatter in a group of shards is quantised. The all-reduce
    over the replicas stays torch's.

    Raises:
        ConfigError: INT4 weights, or a torch whose FSDP2 takes no other collectives.
        UsageError: no module is sharded, or one has several groups of parameters. Nothing was changed then.
    """
    if weights is None and gradients is None:
        return
    if weights not in (None, QuantizedType.INT8):
        raise ConfigError(f"weights={weights} has too few bits to compute with. Use int8.")
    groups = _shard_groups(model)
    for module, group in groups.items():
        if weights is not None:
            module.set_custom_all_gather(QuantizedAllGather(BITS[weights], group))
        if gradients is not None:
            module.set_custom_reduce_scatter(QuantizedReduceScatter(BITS[gradients]))


class QuantizedAllGather(ShardCollective):
    """FSDP2's ``AllGather``: shards travel as integers in ``group``, and as they are in any other group."""

    def __init__(self, bits: int, group: dist.ProcessGroup) -> None:
        self.bits = bits
        self.group_name = group.group_name

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` (n,) of every rank, in rank order, into ``output_tensor`` (N n,).

        Raises:
            UsageError: the shards are not float32, bfloat16 or float16.
        """
        # The gathers of a secondary partition (hpZ), whose weights were quantised before they were cut.
        if group.group_name != self.group_name:
            with waiting_for_ranks():
                return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        if not input_tensor.is_floating_point():
            raise UsageError(
                f"Weights are gathered as {input_tensor.dtype}, which cannot be quantised: a group of parameters "
                "has several dtypes (FSDP2 gathers these as bytes), or is quantised already. Set one dtype with "
                "MixedPrecisionPolicy(param_dtype=...), or drop quantized_weights."
            )
        count = input_tensor.numel()
        sent = to_message(input_tensor, bits=self.bits)
        received = sent.new_empty((group.size(), sent.numel()))
        # [n] -> [message bytes] here, [N, message bytes] from all ranks -> [N n] in ``finish``.
        work = all_gather_into_tensor(received.view(-1), sent, group=group, async_op=async_op)

        def finish() -> None:
            from_message(received, count, bits=self.bits, out=output_tensor.view(-1, count))

        return _finished(work, finish, [sent, received])


class QuantizedReduceScatter(ShardCollective):
    """FSDP2's ``ReduceScatter``: an all-to-all of integers, and a sum in float32."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (N n,) over the ranks; this rank's part of the result into ``output_tensor`` (n,).

        Raises:
            UsageError: ``op`` is not SUM, AVG or PREMUL_SUM, or the gradients are not float32, bfloat16 or float16.
        """
        factor = factor_of(op, group.size())
        count = output_tensor.numel()
        # [N, message bytes]: row r is this rank's part of the gradient of rank r's shard.
        sent = to_message(input_tensor.view(-1, count), bits=self.bits)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=async_op)

        def finish() -> None:
            # Every rank's addend is decoded before the sum: integers of different scales cannot be added.
            total = from_message(received, count, bits=self.bits).sum(dim=0)
            output_tensor.copy_(total.mul_(factor))

        return _finished(work, finish, [sent, received])


class _Deferred(dist.Work):
    """A collective under way whose result is decoded in the stream that waits for it."""

    def __init__(self, work: dist.Work, finish: Callable[[], None], buffers: list[torch.Tensor]) -> None:
        super().__init__()
        self._work = work
        self._finish: Callable[[], None] | None = finish
        self._buffers = buffers

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._finish is not None:
            self._work.wait(timeout)
            for buffer in self._buffers:
                # They were allocated in the stream that began, perhaps another one.
                if buffer.device.type != "cpu":
                    buffer.record_stream(torch.accelerator.current_stream(buffer.device))
            self._finish()
            self._finish, self._buffers = None, []
        return True


def _finished(
    work: dist.Work | None, finish: Callable[[], None], buffers: list[torch.Tensor]
) -> dist.Work | None:
    """Return what FSDP2 expects: None when the current stream has the result, else something to wait for."""
    if work is None:
        finish()
        return None
    return _Deferred(work, finish, buffers)


def _shard_groups(model: nn.Module) -> dict[ShardedModule, dist.ProcessGroup]:
    """Return the sharded modules of ``model`` that own parameters, and the ranks over which each is sharded."""
    if not (
        hasattr(FSDPModule, "set_custom_all_gather") and hasattr(FSDPModule, "set_custom_reduce_scatter")
    ):
        raise ConfigError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather, which quantised collectives need. "
            "Install a newer torch, or drop quantized_weights and quantized_gradients."
        )
    groups: dict[ShardedModule, dist.ProcessGroup] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        owned = fsdp2.param_groups(module)
        if len(owned) > 1 or any(fsdp2.all_gather_group(group) is None for group in owned):
            raise UsageError(
                f"The module '{name or type(module).__name__}' has {len(owned)} group(s) of parameters, but must "
                "have exactly one, and sharded. Shard it over one mesh, or drop quantized_weights and "
                "quantized_gradients."
            )
        groups.update((module, fsdp2.all_gather_group(group)) for group in owned)
    if not groups:
        raise UsageError(
            "Quantised collectives need sharded parameters, but the model has no module under fully_shard. Call "
            "fully_shard first, or use zero=3."
        )
    return groups
