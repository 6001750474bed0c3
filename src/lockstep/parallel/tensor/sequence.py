"""Sequence parallelism: between the first and the last block, each rank has a chunk of the sequence.

Norms, dropout and residual sums of a block work on single positions, so that a chunk is enough for them.

Reference: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lockstep.comm.tree import Args, Kwargs
from lockstep.errors import UsageError
from lockstep.parallel.tensor import communication
from lockstep.parallel.tensor.modules import ParallelHook, TensorParallelGroup, first_tensor, with_argument
from lockstep.parallel.tensor.randomness import HasDropout, Stream, stream_of_rank


class SequenceBlock(ParallelHook):
    """Of a block: the first splits its input, the last gathers its output."""

    def __init__(
        self, name: str, group: TensorParallelGroup, drops: HasDropout, device: torch.device
    ) -> None:
        self.name, self.group = name, group
        self.is_first = self.is_last = False
        self._drops, self._device = drops, device
        self._stream: Stream | None = None

    def enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Args, Kwargs]:
        if self.is_first and self.group.sequence:
            found = first_tensor(args, kwargs)
            if found is None or found[1].dim() < 3:
                raise UsageError(
                    f"'{self.name}' was called without a tensor of shape [batch, sequence, width], which "
                    "sequence_parallel would split. Turn sequence_parallel off."
                )
            place, hidden = found
            length, ranks = hidden.shape[1], self.group.mesh.size()
            if length % ranks == 0:
                args, kwargs = with_argument(
                    args, kwargs, place, communication.split(hidden, self.group.mesh, 1)
                )
            elif torch.is_grad_enabled():
                raise UsageError(
                    f"A sequence of {length} positions cannot be split over tp={ranks} ranks as sequence_parallel "
                    f"asks. Pad batches to a multiple of {ranks}, or turn sequence_parallel off."
                )
            else:
                # Without gradients each rank may compute the whole sequence: nothing but memory is lost.
                self.group.is_split = False
        if self.group.is_split and self._drops():
            self._stream = stream_of_rank(self._device, self.group.mesh)
        return args, kwargs

    def leave(self, module: nn.Module, output: object) -> object:
        if not (self.is_last and self.group.is_split):
            return output
        if isinstance(output, Tensor):
            return self._gathered(output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (self._gathered(output[0]), *output[1:])
        raise UsageError(
            f"'{self.name}' returned a {type(output).__name__} in place of a tensor or a tuple that begins with one, "
            "which sequence_parallel would gather. Turn sequence_parallel off."
        )

    def close(self, module: nn.Module) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _gathered(self, output: Tensor) -> Tensor:
        # Behind the last block all ranks compute alike, so backward takes a part of one gradient and sums nothing.
        size = output.shape[1] * self.group.mesh.size()
        return communication.gather(output, self.group.mesh, 1, size)


def check_blocks(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raise UsageError unless there are blocks of one list."""
    if not blocks:
        raise UsageError(
            f"sequence_parallel splits activations between blocks, but no blocks of {type(model).__name__} were "
            "found. Name them with blocks=..., as a class or as a pattern such as 'layers.*'."
        )
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) > 1:
        raise UsageError(
            "sequence_parallel needs one list of blocks that run one after the other, but those of "
            f"{type(model).__name__} are in {', '.join(map(repr, sorted(lists)))}. Turn sequence_parallel off, "
            "or name the blocks of one list with blocks=..."
        )
