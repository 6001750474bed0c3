"""What split layers, and the modules around them, send.

    column      y_r = x W_r^T        forward: nothing      backward: all-reduce of x's gradient
    row         y = sum x_r W_r^T    forward: all-reduce   backward: nothing
    embedding   rows of W            forward: all-reduce   backward: nothing

With the sequence split between blocks, a column layer all-gathers x and a row layer reduce-scatters y.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lockstep.comm.tree import Args, Kwargs
from lockstep.errors import UsageError
from lockstep.parallel.tensor import communication
from lockstep.parallel.tensor.communication import part_of
from lockstep.parallel.tensor.elsewhere import WeightElsewhere, leave_logits
from lockstep.parallel.tensor.modules import (
    ParallelHook,
    TensorParallelGroup,
    first_tensor,
    spec_of,
    with_argument,
)
from lockstep.parallel.tensor.randomness import HasDropout, Stream, stream_of_group, stream_of_rank
from lockstep.parallel.tensor.rank_features import RankFeatures, ReportedWidth, unmarked
from lockstep.torch_internals import modules as torch_modules

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


MARKED_FORWARDS = 2
"""That of the proof, and the first of training: its backward refuses a loss that was computed of features."""


class ColumnRowRegion(ParallelHook):
    """Of a module whose column layers read the same input: it is sent once.

    From the first column layer's output to the row layer's input the ranks work on different parts, and draw
    different random numbers.
    """

    def __init__(self, group: TensorParallelGroup, drops: HasDropout, device: torch.device) -> None:
        self.group = group
        self.widths: set[int] = set()
        self.gathers = False
        self.heads = 0
        self._marks_left: int | None = MARKED_FORWARDS
        self._is_called = False
        self._drops = drops
        self._device = device
        self._sent: tuple[Tensor, Tensor] | None = None
        self._stream: Stream | None = None
        group.after_forward.append(self._count_forward)

    def set_heads(self, heads: int, gathers: bool) -> None:
        """Let this be attention; ``gathers``: it is given chunks of the sequence."""
        self.heads, self.gathers = heads, gathers

    def enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Args, Kwargs]:
        """Enter attention: its input as a whole sequence, and as wide as this rank's heads."""
        if self.gathers and self.group.is_split:
            found = self._hidden(args, kwargs)
            if found is not None:
                whole = communication.gather_sequence(found[1], self.group.mesh)
                args, kwargs = with_argument(args, kwargs, found[0], whole)
        if self.heads:
            args = tuple(self._of_rank(value) for value in args)
            kwargs = {name: self._of_rank(value) for name, value in kwargs.items()}
        return args, kwargs

    def close(self, module: nn.Module) -> None:
        self._sent = None
        self.end_parts()

    def send(self, x: Tensor, in_sequence: bool) -> Tensor:
        """Send ``x`` [..., features] to a column layer, and to those after it that read the same."""
        if self.gathers and self.group.is_split:
            # It was gathered as the module was entered.
            return x
        # Query, key and value read one input: it is copied once, so that backward sums its gradient once.
        if self._sent is None or self._sent[0] is not x:
            if in_sequence and self.group.is_split:
                sent = communication.gather_sequence(x, self.group.mesh)
            else:
                sent = communication.copy(x, self.group.mesh)
            self._sent = (x, sent)
        return self._sent[1]

    def marked(self, output: Tensor) -> Tensor:
        """Mark the output [..., features / N] of a column layer as this rank's part, where whole tensors may meet it.

        Marks cost some microseconds for each operation. Where the first forwards had no use for them, they end. With a
        split sequence there are none: gradients of whole parameters in blocks are sums then, and nothing else fits.
        Compiled code, which cannot look for such places, has those that the proof of the first batch has found.
        """
        if self._marks_left == 0 or self.group.is_split or not torch.is_grad_enabled():
            return output
        if self._marks_left is not None and torch.compiler.is_compiling():
            return output
        self._is_called = True
        return RankFeatures.of(output, self._met)

    def _met(self, operand: Tensor) -> Tensor:
        self._marks_left = None
        return communication.copy(operand, self.group.mesh)

    def _count_forward(self) -> None:
        if self._marks_left and self._is_called:
            self._marks_left -= 1
            self._is_called = False

    def begin_parts(self) -> None:
        if self._stream is None and self._drops():
            # Each rank drops other elements of other features, as one process would.
            self._stream = stream_of_rank(self._device, self.group.mesh)

    def end_parts(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _hidden(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[int | str, Tensor] | None:
        given: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
        for place, value in given:
            # The hidden states: the first [batch, sequence, width] as wide as the column layers' input.
            if isinstance(value, Tensor) and value.dim() >= 3 and value.shape[-1] in self.widths:
                return place, value
        return None

    def _of_rank(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        is_wide = value.dim() > 1 and value.shape[-1] in self.widths
        # [batch, heads, queries, keys]: a bias or a mask of each head goes with the heads of this rank. Images may
        # have as many rows as there are heads.
        is_of_heads = value.dim() == 4 and value.shape[1] == self.heads
        if is_of_heads and (not is_wide or value.shape[2] == value.shape[3]):
            return self.marked(communication.split(unmarked(value), self.group.mesh, 1))
        if is_wide:
            return ReportedWidth.of(value, value.shape[-1] // self.group.mesh.size())
        return value

    def __deepcopy__(self, memo: dict[int, object]) -> ColumnRowRegion:
        # A copy of the module is in no call: what was sent for the one that runs is not its own.
        copied = object.__new__(ColumnRowRegion)
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__, _sent=None, _stream=None)
        copied._drops = deepcopy(self._drops, memo)
        return copied


class SplitLayer(ParallelHook):
    """A layer with split parameters: ``names`` of them."""

    def __init__(self, name: str, group: TensorParallelGroup, names: tuple[str, ...]) -> None:
        self.name, self.group, self.names = name, group, names
        self.in_sequence = False
        self._is_inside = False

    def value(self, module: nn.Module, name: str, parameter: DTensor) -> Tensor | WeightElsewhere | None:
        # Read from outside of the layer, such as for a penalty on weights: the rank's part alone would be wrong.
        if not self._is_inside:
            return WeightElsewhere(self.group, parameter, module)
        return parameter.to_local()

    def padding_index(self, module: nn.Module, index: int | None) -> int | None:
        return index

    def enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Args, Kwargs]:
        found = first_tensor(args, kwargs)
        if found is None:
            return args, kwargs
        place, x = found
        if isinstance(x, ReportedWidth):
            x = x.whole
        entered = with_argument(args, kwargs, place, self.take(module, x))
        self._is_inside = True
        return entered

    def take(self, module: nn.Module, x: Tensor) -> Tensor:
        raise NotImplementedError

    def close(self, module: nn.Module) -> None:
        self._is_inside = False


class ColwiseParallel(SplitLayer):
    """``y_r = x W_r^T + b_r``, [..., in] to [..., out / N]; with ``size``, gathered, or left as split logits."""

    def __init__(
        self, name: str, group: TensorParallelGroup, names: tuple[str, ...], region: ColumnRowRegion
    ) -> None:
        super().__init__(name, group, names)
        self.region = region
        self.size = 0
        self.pieces = 1
        self.is_head = False

    def value(self, module: nn.Module, name: str, parameter: DTensor) -> Tensor | WeightElsewhere | None:
        if name != "bias" or self.pieces == 1 or not self._is_inside:
            return super().value(module, name, parameter)
        # It is held whole, see ``parameters.placement``: each rank has the gradient of its part.
        mesh = self.group.mesh
        # The parts of q, k and v lie apart in the whole bias, so it can't be a plain shard.
        bias = communication.copy(parameter.to_local(), mesh)
        return communication.part_of_pieces(bias, self.pieces, mesh.get_local_rank(), mesh.size())

    def take(self, module: nn.Module, x: Tensor) -> Tensor:
        return self.region.send(x, self.in_sequence)

    def leave(self, module: nn.Module, output: Tensor) -> object:
        if self.size:
            # The output layer has no row layer behind it: its features are gathered, or stay split for a loss that
            # can take them.
            return leave_logits(output, self.group, self.size, self.is_head and module.training)
        self.region.begin_parts()
        return self.region.marked(output)


class RowwiseParallel(SplitLayer):
    """``y = sum_r x_r W_r^T + b``, [..., in / N] to [..., out]; a whole ``x`` [..., in] is split."""

    def __init__(
        self,
        name: str,
        group: TensorParallelGroup,
        names: tuple[str, ...],
        region: ColumnRowRegion,
        features: int,
        splits: bool,
    ) -> None:
        super().__init__(name, group, (*names, "bias"))
        self.region, self.features, self.splits = region, features, splits

    def value(self, module: nn.Module, name: str, parameter: DTensor) -> Tensor | WeightElsewhere | None:
        if name != "bias":
            return super().value(module, name, parameter)
        if not self._is_inside:
            return spec_of(module).whole_value(parameter)
        # It is added to the sum, once: if each rank added it, the sum would have it N times. Conv1D insists on one.
        return parameter.to_local().new_zeros(parameter.shape) if hasattr(module, "nf") else None

    def take(self, module: nn.Module, x: Tensor) -> Tensor:
        # What follows the row layer is whole again: all ranks draw the same numbers.
        self.region.end_parts()
        x = unmarked(x)
        if self.splits:
            return communication.split(x, self.group.mesh, -1)
        _, length = part_of(self.features, self.group.mesh)
        if x.shape[-1] != length:
            raise UsageError(
                f"'{self.name}' is split by rows and takes {length} of {self.features} features, but was given "
                f"{x.shape[-1]}: the layer that computes its input is not split to match. Split that layer as "
                "'colwise', or give this layer the style 'rowwise_split_input' in tp_plan."
            )
        return x

    def leave(self, module: nn.Module, output: Tensor) -> Tensor:
        mesh = self.group.mesh
        if self.in_sequence and self.group.is_split:
            output = communication.scatter_sequence(output, mesh)
        else:
            output = communication.reduce(output, mesh)
        bias = torch_modules.parameters_of(module).get("bias")
        if bias is None:
            return output
        return output + spec_of(module).whole_value(bias).to(output.dtype)


class VocabularyParallel(SplitLayer):
    """An embedding whose rows are split, integers [...] to [..., width]: a rank looks up its own, others are zero."""

    def __init__(self, name: str, group: TensorParallelGroup, rows: int) -> None:
        super().__init__(name, group, ("weight",))
        self._start, self._length = part_of(rows, group.mesh)
        self._elsewhere: Tensor | None = None

    def padding_index(self, module: nn.Module, index: int | None) -> int | None:
        if not self._is_inside or index is None:
            return index
        # The padding row is on one rank alone, under another number.
        local = index - self._start
        return local if 0 <= local < self._length else None

    def take(self, module: nn.Module, x: Tensor) -> Tensor:
        local = x - self._start
        # Rows of other ranks look up row 0 and are set to zero behind it, so the sum over the ranks has one row that
        # counts.
        self._elsewhere = (local < 0) | (local >= self._length)
        return local.masked_fill(self._elsewhere, 0)

    def leave(self, module: nn.Module, output: Tensor) -> Tensor:
        assert self._elsewhere is not None
        return communication.reduce(output.masked_fill(self._elsewhere.unsqueeze(-1), 0.0), self.group.mesh)

    def close(self, module: nn.Module) -> None:
        super().close(module)
        self._elsewhere = None


class ColwiseEmbedding(SplitLayer):
    """An embedding whose columns are split, integers [...] to [..., width]: each rank looks up a part of each row."""

    def __init__(self, name: str, group: TensorParallelGroup, width: int) -> None:
        super().__init__(name, group, ("weight",))
        self._width = width

    def take(self, module: nn.Module, x: Tensor) -> Tensor:
        return x

    def leave(self, module: nn.Module, output: Tensor) -> Tensor:
        return communication.gather(output, self.group.mesh, -1, self._width)


class Root(ParallelHook):
    """Of the model: all ranks draw the same random numbers."""

    def __init__(self, group: TensorParallelGroup, drops: HasDropout, device: torch.device) -> None:
        self.group, self._drops, self._device = group, drops, device
        self._stream: Stream | None = None

    def enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Args, Kwargs]:
        if module.training and self._stream is None and self._drops():
            self._stream = stream_of_group(self._device, self.group.mesh)
        return args, kwargs

    def close(self, module: nn.Module) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
