"""Tensor-parallel layers for models that are written with them, after Megatron-LM.

Each takes ``mesh``, the 1-D DeviceMesh of its ranks (``None``: a plain layer), and has parameters that are DTensors
on it. All draw the values that the plain layer would draw from the same seed, and take those of the first rank, so
the numbers are those of the plain model. Inputs and outputs are plain tensors. Construction is collective.

A model's other parameters must be DTensors too, for optimizers to treat all alike: ``tensor_parallel(model, mesh)``
replicates what is not split.

References: Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models, MLSys 2023 (``sequence_parallel``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import UsageError
from lockstep.parallel.tensor import communication
from lockstep.parallel.tensor.communication import part_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ParallelLayer(nn.Module):
    """Base: holds its mesh, and splits the parameters of the plain layer that it was made from."""

    def __init__(self, mesh: DeviceMesh | None = None, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.mesh = mesh
        self.sequence_parallel = sequence_parallel and mesh is not None

    def _take_parameters(self, plain: nn.Module, dims: dict[str, int | None]) -> None:
        """Take this rank's part of parameters; ``dims``: parameter -> the dimension that is split."""
        for name, parameter in plain.named_parameters():
            self.register_parameter(name, _split(parameter, self.mesh, dims[name]))
        # Without a bias the attribute is there and None, as in torch's layers.
        for name in dims.keys() - dict(plain.named_parameters()).keys():
            self.register_parameter(name, None)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        import copy

        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        # A group of processes cannot be copied.
        memo[id(self.mesh)] = self.mesh
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied


class ColumnParallelLinear(ParallelLayer):
    """A linear layer of which each rank computes a part of the output features: ``y_r = x W_r^T + b_r`` on rank r.

    The input has the shape [..., in_features] and is the same on all ranks. With N ranks, the output has the shape
    [..., out_features / N]. The weight [out_features, in_features] is split by rows.

    Args:
        in_features: The number of input features.
        out_features: The number of output features, over all ranks.
        bias: Whether there is a bias b, [out_features].
        mesh: A 1-D mesh of the ranks. None: it is a plain linear layer.
        gather_output: Return all features, [..., out_features], on all ranks.
        sequence_parallel: The input is this rank's chunk of the sequence, [batch, sequence / N, in_features]. The
            layer gathers the whole sequence first.
        device: The device of the weight. None: torch's default device.
        dtype: The dtype of the weight. None: torch's default dtype.

    Raises:
        UsageError: ``out_features`` is not divisible by the number of ranks, and ``gather_output`` is False.

    Examples:
        ```python
        import torch
        from torch.distributed import init_device_mesh
        from lockstep import Accelerator
        from lockstep.nn import ColumnParallelLinear

        ranks = Accelerator(cpu=True).num_processes
        mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None  # None: a plain layer
        layer = ColumnParallelLinear(16, 8, mesh=mesh)
        x = torch.ones(2, 16)  # alike on all ranks
        part = layer(x)
        assert part.shape == (2, 8 // ranks)  # this rank's features
        assert torch.equal(layer.part(layer.send(x)), part)  # the two halves of a call
        ```
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mesh, sequence_parallel)
        if not gather_output:
            check_divides(out_features, "output features of a ColumnParallelLinear", mesh)
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        self._take_parameters(
            nn.Linear(in_features, out_features, bias, device=device, dtype=dtype), {"weight": 0, "bias": 0}
        )

    def send(self, x: Tensor) -> Tensor:
        """Send the input ``x``, [..., in_features], and return the argument of ``part``. Layers with the same input
        can share it.
        """
        if self.mesh is None:
            return x
        if self.sequence_parallel:
            return communication.gather_sequence(x, self.mesh)
        return communication.copy(x, self.mesh)

    def part(self, sent: Tensor) -> Tensor:
        """Compute this rank's output features, [..., out_features / N]. ``sent`` is the result of ``send``."""
        return F.linear(sent, local_value(self.weight), local_value(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        output = self.part(self.send(x))
        if self.mesh is None or not self.gather_output:
            return output
        return communication.gather(output, self.mesh, -1, self.out_features)


class RowParallelLinear(ParallelLayer):
    """A linear layer of which each rank uses a part of the input features: ``y = sum_r x_r W_r^T + b``.

    With N ranks, the input of a rank has the shape [..., in_features / N]. The output has the shape [...,
    out_features] and is the same on all ranks. The weight [out_features, in_features] is split by columns.

    Args:
        in_features: The number of input features, over all ranks.
        out_features: The number of output features.
        bias: Whether there is a bias b, [out_features].
        mesh: A 1-D mesh of the ranks. None: it is a plain linear layer.
        input_is_parallel: The input is this rank's part of the features. With False, it is [..., in_features], the
            same on all ranks.
        sequence_parallel: Return this rank's chunk of the sequence, [batch, sequence / N, out_features]. The
            gradients of the bias are summed over the ranks.
        device: The device of the weight. None: torch's default device.
        dtype: The dtype of the weight. None: torch's default dtype.

    Raises:
        UsageError: ``in_features`` is not divisible by the number of ranks.

    Examples:
        ```python
        import torch
        from torch.distributed import init_device_mesh
        from lockstep import Accelerator
        from lockstep.nn import ColumnParallelLinear, RowParallelLinear

        ranks = Accelerator(cpu=True).num_processes
        mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
        up, down = ColumnParallelLinear(16, 64, mesh=mesh), RowParallelLinear(64, 16, mesh=mesh)
        out = down(up(torch.ones(2, 16)).relu())  # one all-reduce, in the second layer
        assert out.shape == (2, 16)
        ```
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh | None = None,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mesh, sequence_parallel)
        check_divides(in_features, "input features of a RowParallelLinear", mesh)
        self.in_features, self.out_features, self.input_is_parallel = (
            in_features,
            out_features,
            input_is_parallel,
        )
        self._take_parameters(
            nn.Linear(in_features, out_features, bias, device=device, dtype=dtype),
            {"weight": 1, "bias": None},
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = local_value(self.weight), local_value(self.bias)
        if self.mesh is None:
            return F.linear(x, weight, bias)
        if not self.input_is_parallel:
            x = communication.split(x, self.mesh, -1)
        output = F.linear(x, weight)
        if self.sequence_parallel:
            output = communication.scatter_sequence(output, self.mesh)
            # Each rank adds it to its own chunk, so that its gradient is the sum over the ranks.
            bias = bias if bias is None else communication.copy(bias, self.mesh)
        else:
            output = communication.reduce(output, self.mesh)
        return output if bias is None else output + bias


class VocabParallelEmbedding(ParallelLayer):
    """An embedding of which each rank holds a part of the rows.

    The input are integers of any shape [...], the same on all ranks. The output has the shape [..., embedding_dim].
    The weight is [num_embeddings, embedding_dim].

    Args:
        num_embeddings: The size of the vocabulary. It need not be divisible by the number of ranks.
        embedding_dim: The number of features.
        padding_idx: An index whose row gets no gradient. None: there is none.
        mesh: A 1-D mesh of the ranks. None: it is a plain embedding.
        device: The device of the weight. None: torch's default device.
        dtype: The dtype of the weight. None: torch's default dtype.

    Raises:
        UsageError: the vocabulary is so small that a rank would have no rows.

    Examples:
        ```python
        import torch
        from torch.distributed import init_device_mesh
        from lockstep import Accelerator
        from lockstep.nn import VocabParallelEmbedding

        ranks = Accelerator(cpu=True).num_processes
        mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
        embedding = VocabParallelEmbedding(1000, 16, mesh=mesh)  # two ranks: 500 rows each
        assert embedding(torch.tensor([[3, 997]])).shape == (1, 2, 16)
        ```
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mesh)
        # Parts have ceil(rows / ranks) rows: those of the last rank would begin behind the end.
        if mesh is not None and -(-num_embeddings // mesh.size()) * (mesh.size() - 1) >= num_embeddings:
            raise UsageError(
                f"A vocabulary of {num_embeddings} is too small for tp={mesh.size()} ranks: the last rank would "
                "have no rows. Use fewer ranks, or nn.Embedding."
            )
        plain = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = plain.padding_idx
        self._take_parameters(plain, {"weight": 0})

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local_value(self.weight)
        assert weight is not None
        if self.mesh is None:
            return F.embedding(tokens, weight, self.padding_idx)
        start, length = part_of(self.num_embeddings, self.mesh)
        local = tokens - start
        elsewhere = (local < 0) | (local >= length)
        padding = None if self.padding_idx is None else self.padding_idx - start
        if padding is not None and not 0 <= padding < length:
            padding = None
        # Tokens of other ranks look up row 0, which is made zero before the sum over the ranks.
        rows = F.embedding(local.masked_fill(elsewhere, 0), weight, padding)
        return communication.reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.mesh)


def check_divides(number: int, what: str, mesh: DeviceMesh | None) -> None:
    """Raise UsageError where ``number`` cannot be divided among the ranks."""
    if mesh is not None and number % mesh.size():
        raise UsageError(
            f"The {number} {what} cannot be divided among tp={mesh.size()} ranks. Choose a multiple of {mesh.size()}."
        )


def local_value(parameter: object) -> Any:
    """Return this rank's part of a parameter, through which gradients flow."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


def _split(parameter: nn.Parameter, mesh: DeviceMesh | None, dim: int | None) -> nn.Parameter:
    if mesh is None:
        return parameter
    from torch.distributed.tensor import Replicate, Shard

    from lockstep.parallel.tensor.parameters import distribute

    return distribute(parameter, mesh, Replicate() if dim is None else Shard(dim))
