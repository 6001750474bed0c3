"""A feed-forward block and an attention layer that are written with tensor-parallel layers, after Megatron-LM.

References: Shoeybi et al., Megatron-LM, 2019; Ainslie et al., GQA, 2023 (``kv_heads``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.tree import Kwargs
from lockstep.errors import UsageError
from lockstep.parallel.tensor.layers import (
    ColumnParallelLinear,
    ParallelLayer,
    RowParallelLinear,
    check_divides,
)
from lockstep.parallel.tensor.randomness import stream_of_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ParallelMLP(nn.Module):
    """A feed-forward block whose hidden features are split over the ranks.

    It computes ``down(activation(up(x)))``, or ``down(activation(gate(x)) * up(x))`` if ``gated``. Input and output
    have the shape [batch, sequence, width]. With ``sequence_parallel`` on N ranks, it is [batch, sequence / N,
    width]. Forward and backward each make one all-reduce of a tensor [batch, sequence, width].

    Args:
        width: The number of input and output features.
        hidden: The number of hidden features, by default 4 * width.
        activation: An elementwise function.
        gated: Whether there is a third layer, ``gate``.
        bias: Whether the layers have biases.
        mesh: A 1-D mesh of the ranks. None: it is a plain block.
        sequence_parallel: Input and output are this rank's chunk of the sequence.

    Raises:
        UsageError: ``hidden`` is not divisible by the number of ranks.

    Examples:
        ```python
        import torch
        from torch.distributed import init_device_mesh
        from lockstep import Accelerator
        from lockstep.nn import ParallelMLP

        ranks = Accelerator(cpu=True).num_processes
        mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
        torch.manual_seed(0)
        split, x = ParallelMLP(16, 64, mesh=mesh), torch.ones(2, 3, 16)
        torch.manual_seed(0)
        torch.testing.assert_close(split(x), ParallelMLP(16, 64)(x))  # the numbers of the plain layers
        ```
    """

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        *,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        gated: bool = False,
        bias: bool = True,
        mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        check_divides(hidden, "hidden features of a ParallelMLP", mesh)
        shared: Kwargs = {"mesh": mesh, "sequence_parallel": sequence_parallel}
        self.activation = activation
        self.gate = ColumnParallelLinear(width, hidden, bias, **shared) if gated else None
        self.up = ColumnParallelLinear(width, hidden, bias, **shared)
        self.down = RowParallelLinear(hidden, width, bias, **shared)

    def forward(self, x: Tensor) -> Tensor:
        # Sent once for both: one gather in forward, and one sum of gradients in backward.
        sent = self.up.send(x)
        hidden = self.up.part(sent)
        if self.gate is None:
            return self.down(self.activation(hidden))
        return self.down(self.activation(self.gate.part(sent)) * hidden)


class ParallelAttention(nn.Module):
    """Multi-head attention of which each rank computes a part of the heads, by ``scaled_dot_product_attention``.

    Input and output have the shape [batch, sequence, width]. With ``sequence_parallel`` on N ranks, it is [batch,
    sequence / N, width]. Forward and backward each make one all-reduce of a tensor [batch, sequence, width].

    Args:
        width: The number of input and output features.
        heads: The number of heads of queries, over all ranks.
        kv_heads: The number of heads of keys and values, by default ``heads``. Each of them serves ``heads /
            kv_heads`` heads of queries.
        causal: No position attends to later positions.
        dropout: The probability with which attention weights are dropped in training. Each rank draws its own masks.
        bias: Whether the linear layers have biases.
        mesh: A 1-D mesh of the ranks. None: it is a plain layer.
        sequence_parallel: Input and output are this rank's chunk of the sequence.

    Raises:
        UsageError: ``heads`` or ``kv_heads`` is not divisible by the number of ranks, or ``width`` not by ``heads``.

    Examples:
        ```python
        import torch
        from torch.distributed import init_device_mesh
        from lockstep import Accelerator
        from lockstep.nn import ParallelAttention

        ranks = Accelerator(cpu=True).num_processes
        mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
        torch.manual_seed(0)
        split, x = ParallelAttention(16, heads=4, mesh=mesh), torch.ones(2, 3, 16)  # two ranks: 2 heads each
        torch.manual_seed(0)
        torch.testing.assert_close(split(x), ParallelAttention(16, heads=4)(x))
        ```
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        causal: bool = True,
        dropout: float = 0.0,
        bias: bool = True,
        mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if width % heads or heads % kv_heads:
            raise UsageError(
                f"ParallelAttention with width={width}, heads={heads}, kv_heads={kv_heads}: width must be a "
                "multiple of heads, and heads must be a multiple of kv_heads. Choose other sizes."
            )
        check_divides(heads, "heads of a ParallelAttention", mesh)
        check_divides(kv_heads, "key-value heads of a ParallelAttention", mesh)
        shared: Kwargs = {"mesh": mesh, "sequence_parallel": sequence_parallel}
        self.mesh, self.causal, self.dropout = mesh, causal, dropout
        self.head_dim = width // heads
        self.groups = heads // kv_heads
        self.q = ColumnParallelLinear(width, width, bias, **shared)
        self.k = ColumnParallelLinear(width, kv_heads * self.head_dim, bias, **shared)
        self.v = ColumnParallelLinear(width, kv_heads * self.head_dim, bias, **shared)
        self.out = RowParallelLinear(width, width, bias, **shared)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend over ``x``, [batch, sequence, width].

        ``mask``, [sequence, sequence] or [batch, 1, sequence, sequence], is that of ``scaled_dot_product_attention``.
        """
        # [batch, sequence, heads / N * head_dim] -> [batch, heads / N, sequence, head_dim]
        sent = self.q.send(x)
        q, k, v = (
            layer.part(sent).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in self._inputs
        )
        # Heads of keys and values are repeated one by one (k0, k0, k1, k1, ...), to stand beside their queries.
        if self.groups > 1:
            k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        drops = self.dropout if self.training else 0.0
        stream = stream_of_rank(x.device, self.mesh) if drops and self.mesh is not None else None
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=drops, is_causal=self.causal and mask is None
        )
        if stream is not None:
            stream.close()
        return self.out(y.transpose(1, 2).flatten(2))

    @property
    def _inputs(self) -> tuple[ColumnParallelLinear, ...]:
        return self.q, self.k, self.v

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return ParallelLayer.__deepcopy__(self, memo)  # type: ignore[arg-type]
